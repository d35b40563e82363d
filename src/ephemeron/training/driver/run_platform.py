"""Platforms on which functions run independently of their client, as `train`, `attach`, `resume` and `stop` open them.

The record of a run (`run.json`) says where it was started: `platform`, and for clouds the `settings` of the function.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ephemeron.config.typed import build
from ephemeron.functions.async_invoke.provider import CapacityRequest, RunHandle
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.training.driver.records import RunRecord
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.driver.run_status import session_end
from ephemeron.training.job import Configuration

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
    from ephemeron.functions.async_invoke.provider import Provider, Settings
    from ephemeron.functions.base import Limits
    from ephemeron.functions.local import LocalPlatform


_log = logging.getLogger(__name__)


def admit(where: Provider[Any], c: Configuration, settings: Settings, secrets: dict[str, str]) -> tuple[Configuration, Limits]:
    """The configuration with the memory and timeout of a cloud's function, and the cloud's limits: see `Provider.admit`."""
    request, limits = where.admit(_capacity(c), settings, secrets)
    return dataclasses.replace(c, memory_mb=request.memory_mb, function_timeout_s=request.lifetime_s), limits


def handle_of(c: Configuration, *, run: str, run_dir: Path, channel: str, since: float, starting: bool) -> RunHandle:
    """Description of a run for the cloud that opens its calls."""
    return RunHandle(run=run, run_dir=run_dir, capacity=_capacity(c), channel=channel, since=since, starting=starting)


def _capacity(c: Configuration) -> CapacityRequest:
    return CapacityRequest(workers=c.workers, memory_mb=c.memory_mb, lifetime_s=c.function_timeout_s, channel=c.store)


class NotRunning(Exception):
    """All functions of the run have ended."""


async def start(
    folder: RunFolder, run: RunRecord, secrets: dict[str, str], *, session: Path | None = None
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
    from ephemeron.training.driver import driver_lock

    local.sweep(runs)
    driver_lock.sweep(runs)


async def at_work(folder: RunFolder, run: RunRecord) -> bool:
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


async def attach(folder: RunFolder, run: RunRecord, *, restart: bool = True) -> LocalPlatform | AsyncInvokePlatform:
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


async def _open(folder: RunFolder, run: RunRecord, *, starting: bool) -> AsyncInvokePlatform:
    where = cloud(run.platform)
    _log.info("opening calls on %s", where.title)
    handle = handle_of(
        run.run_spec().configuration, run=run.run_id, run_dir=folder.path, channel=run.address, since=run.wall_time, starting=starting
    )
    return await where.open(handle, settings_of(where, run).located())


def settings_of(where: Provider[Any], run: RunRecord) -> Any:
    """Settings of the cloud on which a run was started.

    Raises:
        JobError: the record is of another release.
    """
    return build(where.settings, run.settings, where=f"run.json of {run.run_id}: settings")
