"""Simulated runs that functions drive (`runs.detached`): the simulation is in the memory of the process that drives it.

Where that process dies, another one simulates the run from its beginning, and comes to the same end: the same weights and, where
`[simulation] compute` is given, the same times and bill. What it needs is stored with the run at its launch. Its events take the
place of those before, so nothing is counted twice.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ephemeron import blocking
from ephemeron.communication.keys import Keys
from ephemeron.config.code_bundle import unbundle
from ephemeron.config.typed import build, plain
from ephemeron.config.user_code import put_in_front
from ephemeron.errors import JobError, UserError
from ephemeron.functions.jsonl import begin_again
from ephemeron.runs.folders import CODE_FILE, GROUPS, RESULT_FILE, RunFolder
from ephemeron.runs.header import RunHeader
from ephemeron.runs.kinds import Following
from ephemeron.runs.stop_requests import RunStop, obeying
from ephemeron.training.driver import lifecycle, run_logging
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.records import CodeSource, run_spec
from ephemeron.training.driver.result import Result, conclude
from ephemeron.training.job import Job
from ephemeron.training.worker.spec import RunSpec

if TYPE_CHECKING:
    from ephemeron.communication.channels.base import Buffer

_log = logging.getLogger(__name__)

_FOLDER = "simulation"
"""Of what is stored, in that of the run: an archive for each region, or one."""
_HEAD, _OBJECTS = "prepared.json", "objects/"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """A `Prepared` without its objects, of which the specification is one."""

    run: str
    job: Job
    model_bytes: int
    source: CodeSource | None
    test_samples: int
    notes: tuple[str, ...]


def store_simulation(folder: RunFolder, parts: Sequence[Prepared]) -> None:
    """Stores what a run is simulated from.

    Args:
        folder: of the run.
        parts: its regions, or the run itself.

    Raises:
        JobError: the job cannot be stored.
    """
    place = folder.path / _FOLDER
    place.mkdir()
    for number, part in enumerate(parts):
        head = _Head(
            run=part.spec.run_id,
            job=dataclasses.replace(part.job, run={}),  # an address of [run] may hold a password
            model_bytes=part.model_bytes,
            source=part.source,
            test_samples=part.test_samples,
            notes=part.notes,
        )
        try:
            text = json.dumps(plain(head))
        except (TypeError, ValueError) as e:
            raise JobError(f"the job cannot be stored with the run, since it is no JSON: {e}", remedy="leave --detach out") from None
        with zipfile.ZipFile(place / f"{number}.zip", "w") as archive:
            archive.writestr(_HEAD, text)
            for key, buffers in part.objects.items():
                with archive.open(_OBJECTS + key, "w", force_zip64=True) as entry:
                    for buffer in buffers:
                        entry.write(buffer)


def stored_simulation(folder: RunFolder) -> list[Prepared]:
    """What a run is simulated from.

    Raises:
        UserError: it was not stored, or by another release.
    """
    found = []
    for number in range(len(list((folder.path / _FOLDER).glob("*.zip")))):
        path = folder.path / _FOLDER / f"{number}.zip"
        with zipfile.ZipFile(path) as archive:
            head = build(_Head, json.loads(archive.read(_HEAD)), where=f"{path}: {_HEAD}")
            names = [name for name in archive.namelist() if name.startswith(_OBJECTS)]
            objects: dict[str, list[Buffer]] = {name.removeprefix(_OBJECTS): [archive.read(name)] for name in names}
        spec = RunSpec.from_bytes(bytes(objects[Keys(head.run).spec][0]))
        found.append(
            Prepared(
                job=head.job,
                spec=spec,
                objects=objects,
                model_bytes=head.model_bytes,
                source=head.source,
                test_samples=head.test_samples,
                notes=head.notes,
            )
        )
    if not found:
        raise UserError(f"run {folder.run_id} was simulated, and what it needs to begin again is not there: start it again")
    return found


def prepare_again(folder: RunFolder) -> list[Prepared]:
    """Makes the folder that of a run which begins, and this process one that has the code of its functions.

    Returns:
        What the run is simulated from.

    Raises:
        UserError: see `stored_simulation`.
    """
    parts = stored_simulation(folder)
    # Simulated functions are in this process, and have the code of the launch, whatever is edited meanwhile.
    put_in_front(unbundle((folder.path / CODE_FILE).read_bytes(), folder.path / _FOLDER / "code"))
    (folder.path / RESULT_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder.path / GROUPS, ignore_errors=True)
    if folder.events.exists() and folder.events.stat().st_size:
        _log.info("run %s is simulated from its beginning", folder.run_id)
        begin_again(folder.events)
    return parts


def forget_simulation(folder: RunFolder) -> None:
    """Deletes what a run that has finished is not simulated from any more."""
    shutil.rmtree(folder.path / _FOLDER, ignore_errors=True)


def simulate_again(folder: RunFolder, header: RunHeader, following: Following) -> Result:
    """Simulates a run from its beginning; the caller has its lock."""
    from ephemeron.functions import simulation

    [prepared] = prepare_again(folder)
    spec, chosen, stop = run_spec(header), run_logging.continued(folder, following.loggers), RunStop()
    with run_logging.logged(folder, spec, chosen, following.on_event) as log:
        ending, meter = blocking.run(
            lambda _: lifecycle.simulate(prepared, folder, prepared.job.simulation, obeying(stop, folder, log.on_event), stop=stop),
            runner=simulation.run,
        )
        result = log.conclude(conclude(folder, spec, meter, ending, None))
    if result.finished:
        forget_simulation(folder)
    return result
