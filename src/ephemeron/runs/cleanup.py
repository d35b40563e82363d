"""Objects that runs have left in their channels, and their deletion.

A finished run leaves its specification, its result and, on a cloud, a tombstone for calls that are delivered again. A run that
was stopped, has failed or was abandoned leaves everything that resuming it needs. Nothing expires by itself, because channels
belong to the user. All keys of a run begin with its name, so objects of other runs and other programs are never listed or
deleted.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron import blocking
from ephemeron.communication.channels import Channel, open_channel
from ephemeron.communication.channels.base import SupportsSizes
from ephemeron.config.paths import bytes_below
from ephemeron.errors import ChannelError, JobError, UserError
from ephemeron.runs.driver_function import prefix_of
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.status import may_be_running, status_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingObjects:
    """Objects that one run has left."""

    folder: RunFolder
    status: str
    """Status of the run, see `run_status`."""
    address: str
    """Address of the channel; empty where the run had none that outlives it."""
    keys: tuple[str, ...]
    nbytes: int
    """Size of all objects, as the store reports it."""
    folder_bytes: int
    """Size of the run's folder without objects in it."""
    ends_with_client: bool = False
    """See `RunHeader`."""
    problem: str = ""
    """Why the channel could not be listed; `keys` is then empty."""

    @property
    def resumable(self) -> bool:
        """Whether the run can be resumed from these objects."""
        return bool(self.keys) and self.status != "finished" and not self.ends_with_client


def left_by(folders: Sequence[RunFolder], *, force: bool = False) -> list[RemainingObjects]:
    """Lists the objects of runs in their channels.

    Args:
        folders: of the runs.
        force: include runs that may be running.

    Raises:
        UserError: one of them may be running.
    """
    folders = [each for folder in folders for each in (folder, *folder.groups)]
    for folder in folders:
        status = status_of(folder)
        if may_be_running(status) and not force:
            name = folder.run_id
            raise UserError(
                f"run {name} is running; first: ephemeron stop {name}"
                if status == "running"
                else f"run {name} may still be running ({status}); find out with: ephemeron attach {name}"
            )
    return blocking.run(lambda _: _look_into(folders))


def remove(leftover: RemainingObjects, *, folder: bool = False) -> None:
    """Deletes a run's objects, and its folder if `folder`. Idempotent.

    Raises:
        ChannelError: the store does not answer, or refuses.
    """
    if leftover.keys:
        blocking.run(lambda _: delete(leftover))
    if folder:
        path = leftover.folder.path
        if path.is_symlink():  # of a study in a folder of the user's choice, which stays
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


async def _look_into(folders: Sequence[RunFolder]) -> list[RemainingObjects]:
    return [await look(folder) for folder in folders]


async def look(folder: RunFolder) -> RemainingObjects:
    """The objects of one run in its channel."""
    record = read_header(folder)
    address, found, problem = "" if record is None else record.channel, dict[str, int](), ""
    if record is None or record.platform == "simulated" or "://" not in address or address.startswith("ps://"):
        address = ""  # memory of processes that have ended, or of services
    else:
        try:
            async with open_channel(address) as channel:
                found = await _objects(channel, folder.run_id)
        except (ChannelError, JobError) as e:
            problem = " ".join(str(e).split())
            _log.warning("objects of run %s cannot be listed: %s", folder.run_id, problem)
    return RemainingObjects(
        folder=folder,
        status=status_of(folder),
        address=address,
        keys=tuple(found),
        nbytes=sum(found.values()),
        folder_bytes=bytes_below(folder.path, without=folder.objects),
        ends_with_client=record is not None and record.ends_with_client,
        problem=problem,
    )


def _prefixes(run: str) -> tuple[str, ...]:
    """Of the keys of a run: its own, and those of a queue of tasks and of calls to a cloud, which have a suffix; and of what drives it."""
    return tuple(f"{name}{mark}" for name in (run, prefix_of(run)) for mark in "/.")


async def _objects(channel: Channel, run: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for prefix in _prefixes(run):
        if isinstance(channel, SupportsSizes):
            found |= await channel.sizes(prefix)
        else:
            found |= dict.fromkeys(await channel.list(prefix), 0)
    return found


async def delete(leftover: RemainingObjects) -> None:
    """Deletes them.

    Raises:
        ChannelError: the store does not answer, or refuses.
    """
    _log.info("deleting %d objects of run %s from %s", len(leftover.keys), leftover.folder.run_id, leftover.address)
    async with open_channel(leftover.address) as channel:
        await channel.delete(leftover.keys)
        for prefix in _prefixes(leftover.folder.run_id):
            channel.discard_staged(prefix)
