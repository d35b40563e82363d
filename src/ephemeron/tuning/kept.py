"""A study as it is kept with its run, so that functions elsewhere drive it, which have neither its file nor the folders of its job.

PROGRAM/study.json     the study file, with the names of the other files
PROGRAM/job.json       the job, with its channel without credentials
PROGRAM/code.zip       the folders of its code
PROGRAM/profile.json   with what trials are predicted, if they are

Of an objective: the study, and the function as it is sent (`executor.programs`), with the way in which it is called.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ephemeron.communication.channels import public_address
from ephemeron.config.code_bundle import unbundle
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.executor.programs import PROGRAM, shipped, store_shipments
from ephemeron.runs.folders import RunFolder
from ephemeron.training.driver.launching.bundle_check import bundled
from ephemeron.training.job import Configuration, Job
from ephemeron.tuning import prediction
from ephemeron.tuning.folder import StudyFolder
from ephemeron.tuning.objective_call import CallForm
from ephemeron.tuning.study_file import KeptObjective, StudyFile, parse_study

_OBJECTIVE, _FORM = "objective", "form"
_STUDY, _JOB, _CODE, _PROFILE = "study.json", "job.json", "code.zip", "profile.json"


def check(file: StudyFile) -> None:
    """Refuses a study that functions elsewhere cannot drive.

    Raises:
        JobError: its job reads files of this machine, beside its code.
    """
    job, c = prediction.any_of(file)
    where = file.job.path.name
    if job.sparse is not None:
        raise JobError(f"{where}: trials of a sparse job are driven where their shards are", remedy="leave --detach out")
    for key, path in _paths(job, c):
        raise JobError(
            f"{where}: {key} = {str(path)!r} is on this machine, and the study would be driven on {c.platform}",
            remedy="have the code of the job read it from a store, or leave --detach out",
        )
    for parameter in file.space:
        if parameter.key == "run.channel" and any(public_address(str(value))[1] for value in parameter.edges):
            raise JobError(f"{where}: an address of run.channel has a password, which is not stored", remedy="leave --detach out")


def keep(file: StudyFile, folder: StudyFolder) -> None:
    """Keeps a study in its folder; one of an objective with the function as it is sent.

    Raises:
        JobError: see `check`, or its code is too large.
    """
    place = folder.path / PROGRAM
    place.mkdir(exist_ok=True)
    if file.spec.objective is not None:
        assert file.kept is not None
        store_shipments(place, {_OBJECTIVE: file.kept.shipment})
        spec = dataclasses.replace(
            file.spec, objective=dataclasses.replace(file.spec.objective, channel=public_address(file.spec.objective.channel)[0])
        )
        (place / _STUDY).write_text(json.dumps({**plain(spec), _FORM: plain(file.kept.form)}))
        return
    check(file)
    job, _ = prediction.any_of(file)
    (place / _CODE).write_bytes(bundled(job))
    profile = prediction.profile_of(file)
    if profile is not None:
        profile.save(place / _PROFILE)
    document: dict[str, Any] = copy.deepcopy(dict(file.job.document))
    document["code"] = [f"code/{number}" for number in range(len(job.code))]
    run = document.get("run", {})
    if "channel" in run:
        run["channel"] = public_address(str(run["channel"]))[0]
    (place / _JOB).write_text(json.dumps(document))
    spec = dataclasses.replace(file.spec, job=Path(_JOB), predict=profile is not None, profile=None if profile is None else Path(_PROFILE))
    (place / _STUDY).write_text(json.dumps(plain(spec)))


def kept(folder: StudyFolder) -> StudyFile:
    """The study that is kept in a folder. Its job and its code are unpacked into another one, which goes with this process.

    Raises:
        JobError: there is none.
    """
    place = folder.path / PROGRAM
    if not (place / _STUDY).exists():
        raise JobError(f"the folder of study {folder.path.name} has no study to drive", remedy="go on with it by its file: --resume")
    raw = json.loads((place / _STUDY).read_text())
    if (form := raw.pop(_FORM, None)) is not None:
        found = KeptObjective(shipment=shipped(RunFolder(folder.path))[_OBJECTIVE], form=build(CallForm, form, where=_STUDY))
        return dataclasses.replace(parse_study(raw, folder=folder.path), kept=found)
    work = Path(tempfile.mkdtemp(prefix="ephemeron-study-"))
    atexit.register(shutil.rmtree, work, ignore_errors=True)
    for name in (_JOB, _PROFILE):
        if (place / name).exists():
            shutil.copy2(place / name, work / name)
    unbundle((place / _CODE).read_bytes(), work / "code")
    return parse_study(raw, folder=work)


def _paths(job: Job, c: Configuration) -> Iterator[tuple[str, Path]]:
    """What a job reads of this machine, beside its code."""
    found = {"data.path": job.data.path, "init": job.init, "run.stages.placement": Path(c.stages.placement) if c.stages.placement else None}
    yield from ((key, path) for key, path in found.items() if path is not None)
