"""Platforms on which functions run independently of their client, as launching, attaching, resuming and stopping open them.

The header of a run (`run.json`) says where it was started: `platform`, and for clouds the `settings` of the function.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.config.typed import build
from ephemeron.errors import JobError, UserError
from ephemeron.functions.async_invoke.provider import CapacityRequest, RunHandle
from ephemeron.functions.base import Suspendable
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.runs.folders import RunFolder, runs_folder
from ephemeron.runs.header import RunHeader, read_header
from ephemeron.runs.status import session_end

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
    from ephemeron.functions.async_invoke.provider import Provider
    from ephemeron.functions.local import LocalPlatform


_log = logging.getLogger(__name__)


class NotRunning(Exception):
    """All functions of the run have ended."""


_driven_here: dict[str, bool] = {}


@contextlib.contextmanager
def driven_here(run_id: str, *, is_copied: bool = False) -> Iterator[None]:
    """Inside, this process drives a run that is detached on a cloud, or works for the process that does.

    Args:
        run_id: of the run.
        is_copied: whether the folder is a copy for a function, and not that of a client.
    """
    _driven_here[run_id] = is_copied
    try:
        yield
    finally:
        _driven_here.pop(run_id, None)


def is_driven_here(run_id: str) -> bool:
    """Whether this is inside `driven_here`."""
    return run_id in _driven_here


def is_copied(run_id: str) -> bool:
    """Whether this is a function that drives the run, with a copy of its folder."""
    return _driven_here.get(run_id, False)


async def start(
    folder: RunFolder, run: RunHeader, secrets: dict[str, str], *, session: Path | None = None
) -> LocalPlatform | AsyncInvokePlatform:
    """A platform to launch or resume the run on. On this machine, the daemon of `session` hosts the functions, if that is given.

    Raises:
        PlatformError: it cannot be opened.
        JobError: the function has changed since.
    """
    if run.platform in CLOUDS:
        return await _open(folder, run, starting=True)
    from ephemeron.functions.local import LocalPlatform

    return await LocalPlatform.start(folder.path, env=secrets, restart=True, spare=session is None, session=session)


def sweep(runs: Path) -> None:
    """Removes what killed clients and daemons have left in the folder of all runs."""
    from ephemeron.functions import local
    from ephemeron.runs import lock

    local.sweep(runs)
    lock.sweep(runs)


async def at_work(folder: RunFolder, run: RunHeader) -> bool:
    """Whether functions of the run are running on this machine."""
    if run.platform in CLOUDS:
        return False
    from ephemeron.errors import DaemonGone
    from ephemeron.functions.local import LocalPlatform

    try:
        async with await LocalPlatform.attach(folder.path) as platform:
            return bool((await platform.status()).running)
    except DaemonGone:
        return False


async def attach(folder: RunFolder, run: RunHeader, *, restart: bool = True) -> LocalPlatform | AsyncInvokePlatform:
    """The platform on which the run was started.

    Args:
        folder, run: of the run.
        restart: replace the process that hosts local functions if it dies; for the client that drives the run.

    Raises:
        NotRunning: the run has ended.
    """
    if run.platform in CLOUDS:
        if session_end(folder.events) is not None:
            raise NotRunning
        return await _open(folder, run, starting=False)
    from ephemeron.errors import DaemonGone
    from ephemeron.functions.local import LocalPlatform

    try:
        return await LocalPlatform.attach(folder.path, restart=restart)
    except DaemonGone:
        raise NotRunning from None


async def cancel(folder: RunFolder, run: RunHeader) -> bool:
    """Ends the functions of a run whose client is gone; whether there may have been any."""
    if run.platform == "simulated":
        return False
    try:
        platform = await attach(folder, run, restart=False)
    except NotRunning:
        return False
    async with platform:
        await platform.cancel_all(folder.run_id)
    return True


async def suspend(folder: RunFolder, run: RunHeader) -> int:
    """Suspends the functions of a run; returns how many.

    Raises:
        UserError: it is not running, or functions of its platform cannot be suspended.
    """
    if run.platform not in CLOUDS or not cloud(run.platform).suspendable:
        raise JobError(
            f"functions of platform {run.platform} cannot be suspended",
            remedy=f"stop the run at a checkpoint: ephemeron stop {folder.run_id}",
        )
    try:
        platform = await attach(folder, run, restart=False)
    except NotRunning:
        raise UserError(f"run {folder.run_id} is not running") from None
    async with platform:
        assert isinstance(platform, Suspendable)
        return await platform.suspend(folder.run_id)


async def wake(folder: RunFolder, run: RunHeader) -> int:
    """Lets suspended functions of a run go on; returns how many there were."""
    if run.platform not in CLOUDS or not cloud(run.platform).suspendable:
        return 0
    try:
        platform = await attach(folder, run, restart=False)
    except NotRunning:
        return 0
    async with platform:
        assert isinstance(platform, Suspendable)
        return await platform.wake(folder.run_id)


async def _open(folder: RunFolder, run: RunHeader, *, starting: bool) -> AsyncInvokePlatform:
    study = read_header(RunFolder(runs_folder() / run.parent)) if run.parent else None
    for each in (run, study):
        if (
            each is not None and each.detached and not is_driven_here(each.run_id)
        ):  # a second collector would delete records that only the first one has read
            raise UserError(f"functions on {run.platform} drive run {each.run_id}; watch it with: ephemeron attach {each.run_id}")
    where = cloud(run.platform)
    _log.info("opening calls on %s", where.title)
    capacity = CapacityRequest(workers=run.functions, memory_mb=run.memory_mb, lifetime_s=run.lifetime_s, channel=run.channel)
    handle = RunHandle(run=run.run_id, run_dir=folder.path, capacity=capacity, channel=run.channel, since=run.started_at, starting=starting)
    return await where.open(handle, settings_of(where, run).located())


def settings_of(where: Provider[Any], run: RunHeader) -> Any:
    """Settings of the cloud on which a run was started.

    Raises:
        JobError: the record is of another release.
    """
    return build(where.settings, run.settings, where=f"run.json of {run.run_id}: settings")
