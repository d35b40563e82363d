"""Requests that a region which was not there at the beginning joins a run that trains, or that one leaves it."""

from __future__ import annotations

import time
from pathlib import Path

from ephemeron import blocking
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.credentials import environment
from ephemeron.communication.channels.retrying import BRIEF
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.errors import JobError, UserError
from ephemeron.regions.driver.added_regions import answer_about, ask
from ephemeron.regions.driver.network_options import variables_of
from ephemeron.regions.driver.region_events import members_of
from ephemeron.regions.planning import planned
from ephemeron.regions.records import RegionKeys
from ephemeron.regions.region_files import group_of, load_regions
from ephemeron.runs.folders import RUN_FILE, RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.lock import is_driven
from ephemeron.training.driver import records
from ephemeron.training.driver.result import open_run

ANSWER_S, _LOOK_S = 180.0, 0.2
"""Seconds to wait for the client of the run, which prepares the region, and interval at which its answer is looked for."""


def join(run_id: str, region: str, file: Path) -> tuple[str, int]:
    """Has the client of a running run start a region.

    Args:
        run_id: name of the run, an unambiguous beginning of it, or `last`.
        region: its name.
        file: a `regions.toml` that describes it.

    Returns:
        The run's full name, and the number of functions of the region.

    Raises:
        RunNotFound: there is no such run.
        UserError: the run has no regions, or has this one; it does not train; no client of `train` drives it; or the client refuses the region.
    """
    regions, _ = planned(load_regions(file))
    group = group_of(regions, region)
    folder, _, _ = open_run(run_id)
    places = members_of(folder)
    if not places:
        raise JobError(f"run {folder.run_id} has no regions", remedy="train with --regions")
    if region in [place.run_id.removeprefix(f"{folder.run_id}-") for place in places]:
        raise JobError(f"run {folder.run_id} has a region {region!r} already", remedy="give this one another name")
    if records.read_result(folder) is not None:
        raise UserError(f"run {folder.run_id} is not running")
    if not is_driven(folder):
        raise UserError(f"no client drives run {folder.run_id}: a region is started by that of train, which has the job")
    ask(folder, group)
    latest = time.monotonic() + ANSWER_S
    while time.monotonic() < latest:
        answer = answer_about(folder, region)
        if answer is not None:
            if answer:
                raise UserError(answer)
            return folder.run_id, group.workers
        if not is_driven(folder):
            raise UserError(f"run {folder.run_id} has ended, or its client has, before region {region} was started")
        time.sleep(_LOOK_S)
    raise UserError(
        f"the client of run {folder.run_id} has not answered within {ANSWER_S:.0f} s: one that has attached to a run starts no regions"
    )


# -- A request that a region leaves a run which goes on without it ------------------------------------------------


def leave(run_id: str, region: str) -> str:
    """Asks a region of a running run to leave it: after its next round it stops at a checkpoint, and the others go on.

    Args:
        run_id: name of the run, an unambiguous beginning of it, or `last`.
        region: its name.

    Returns:
        The run's full name.

    Raises:
        RunNotFound: there is no such run.
        UserError: it has no such region, or the region is the only one, or has ended.
    """
    folder, _, spec = open_run(run_id)
    places = {place.run_id.removeprefix(f"{folder.run_id}-"): place for place in members_of(folder)}
    if region not in places:
        names = ", ".join(places) or "none"
        raise JobError(f"run {folder.run_id} has no region {region!r}", remedy=f"its regions are {names}")
    group = next(group for group in spec.configuration.regions.region if group.name == region)
    ended = {name for name, place in places.items() if records.read_result(place) is not None}
    if region in ended:
        raise UserError(f"region {region} of run {folder.run_id} is not running")
    if len(places) - len(ended) < 2:
        raise JobError(f"{region} is the only region of run {folder.run_id}", remedy=f"ephemeron stop {folder.run_id}")
    variables = variables_of(group.credentials, f"region {region}")
    with environment(variables):
        blocking.run(lambda _: _ask(places[region]))
    return folder.run_id


async def _ask(place: RunFolder) -> None:
    record = read_header(place)
    if record is None:
        raise UserError(f"{place.path} has no readable {RUN_FILE}")
    async with RunChannel(open_channel(record.channel), owner="leave", retry=BRIEF) as channel:
        await channel.put(RegionKeys(place.run_id).leave, [b"1"])
