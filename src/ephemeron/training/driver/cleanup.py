"""What a run has left in its channel, and its removal.

A finished run leaves its specification, its result and, on a cloud, a tombstone that tells a call which is delivered once
more that there is nothing to do. One that was stopped, failed or abandoned leaves everything that resuming it needs.
Nothing expires by itself: channels are the user's own. Everything of a run begins with its name, so nothing of another
run, and nothing that somebody else keeps there, is ever listed or deleted.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron import blocking
from ephemeron.communication.channels import Channel, open_channel
from ephemeron.communication.channels.sizes import SupportsSizes
from ephemeron.errors import ChannelError, JobError, UserError
from ephemeron.functions.async_invoke.records import calls_prefix
from ephemeron.training.driver.records import read_record
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.driver.run_status import may_live, standing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingObjects:
    """Of one run."""

    folder: RunFolder
    status: str
    """Of `run_status`."""
    address: str
    """Of the channel; empty where the run had none that outlives it."""
    keys: tuple[str, ...]
    nbytes: int
    """Of all objects together, as the store counts them."""
    folder_bytes: int
    """Of the run's folder, without objects in it."""
    problem: str = ""
    """Why the channel could not be looked into; then `keys` is empty."""

    @property
    def resumable(self) -> bool:
        """Whether the run could go on from what is there, and no longer when it is deleted."""
        return bool(self.keys) and self.status != "finished"


def left_by(folders: Sequence[RunFolder], *, force: bool = False) -> list[RemainingObjects]:
    """Looks into the channels of runs.

    Args:
        folders: of the runs.
        force: also of runs that may be at work.

    Raises:
        UserError: one of them may be at work.
    """
    for folder in folders:
        status = standing(folder)
        if may_live(status) and not force:
            name = folder.run_id
            raise UserError(
                f"run {name} is running; first: ephemeron stop {name}"
                if status == "running"
                else f"run {name} may still go on ({status}); find out with: ephemeron attach {name}"
            )
    return blocking.run(lambda _: _look_into(folders))


def remove(leftover: RemainingObjects, *, folder: bool = False) -> None:
    """Deletes a run's objects, and its folder where that is wanted. Repeating it is harmless.

    Raises:
        ChannelError: the store does not answer, or refuses.
    """
    if leftover.keys:
        blocking.run(lambda _: _delete(leftover))
    if folder:
        shutil.rmtree(leftover.folder.path, ignore_errors=True)


async def _look_into(folders: Sequence[RunFolder]) -> list[RemainingObjects]:
    return [await _look(folder) for folder in folders]


async def _look(folder: RunFolder) -> RemainingObjects:
    record = read_record(folder)
    address, found, problem = "" if record is None else record.address, dict[str, int](), ""
    if record is None or record.platform == "simulated" or not address or address.startswith("ps://"):
        address = ""  # memory of processes that have ended
    else:
        try:
            async with open_channel(address) as channel:
                found = await _objects(channel, folder.run_id)
        except (ChannelError, JobError) as e:
            problem = " ".join(str(e).split())
            _log.warning("objects of run %s cannot be listed: %s", folder.run_id, problem)
    return RemainingObjects(
        folder=folder, status=standing(folder), address=address, keys=tuple(found), nbytes=sum(found.values()),
        folder_bytes=_bytes_of(folder), problem=problem,
    )  # fmt: skip


async def _objects(channel: Channel, run: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for prefix in (f"{run}/", f"{calls_prefix(run)}/"):
        if isinstance(channel, SupportsSizes):
            found |= await channel.sizes(prefix)
        else:
            found |= dict.fromkeys(await channel.list(prefix), 0)
    return found


async def _delete(leftover: RemainingObjects) -> None:
    _log.info("deleting %d objects of run %s from %s", len(leftover.keys), leftover.folder.run_id, leftover.address)
    async with open_channel(leftover.address) as channel:
        await channel.delete(leftover.keys)


def _bytes_of(folder: RunFolder) -> int:
    mine = (p for p in folder.path.rglob("*") if p.is_file() and not p.is_relative_to(folder.objects))
    return sum(path.stat().st_size for path in mine)
