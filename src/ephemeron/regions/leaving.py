"""A request that a region leaves a run which goes on without it."""

from __future__ import annotations

from ephemeron import blocking
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.credentials import environment
from ephemeron.communication.channels.retry import BRIEF
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.errors import JobError, UserError
from ephemeron.regions.driver.credentials import variables_of
from ephemeron.regions.driver.region_events import members_of
from ephemeron.regions.records import RegionKeys
from ephemeron.runs.folders import RUN_FILE, RunFolder
from ephemeron.runs.header import read_header
from ephemeron.training.driver import records
from ephemeron.training.driver.result import open_run


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
