"""The kind `profile`: functions that measure a job before it is planned, as a run of the process that asks for the profile."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ephemeron.errors import JobError, RunStopped, UserError
from ephemeron.prices import Prices
from ephemeron.runs import folders
from ephemeron.runs.client_run import STOP_LOOK_S, ClientRun, ClientRuns, living
from ephemeron.runs.folders import PROFILE_FILE, RunFolder
from ephemeron.runs.header import RunHeader
from ephemeron.runs.kinds import Following
from ephemeron.runs.lock import driving
from ephemeron.runs.summary import RunResult, RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary(RunSummary):
    """`result.json` of a profile."""

    profile: str = ""
    """File of the profile; empty: there is none."""


class ProfileRuns(ClientRuns):
    """Runs that measure a job."""

    summary = ProfileSummary
    again = "measure again with: ephemeron profile"
    killable = False  # it may be a part of a program of the user

    def resume(self, folder: RunFolder, header: RunHeader, following: Following) -> RunResult:
        raise UserError(f"run {folder.run_id} is of kind profile, which cannot be resumed: {self.again}")


class Saves(Protocol):
    """A profile."""

    def save(self, path: Path) -> None: ...


@contextlib.asynccontextmanager
async def profiling(
    run_id: str,
    name: str,
    *,
    platform: str = "local",
    channel: str = "",
    prices: Prices,
    memory_mb: int,
    lifetime_s: float = 0.0,
    servers: int = 0,
    budget_usd: float | None = None,
    settings: Mapping[str, object] | None = None,
) -> AsyncIterator[ClientRun]:
    """A run for as long as a block measures. Objects in its folder are removed at the end; events, logs, bill and profile stay.

    Args:
        run_id: of the run.
        name: of the job.
        platform, channel, prices, memory_mb, lifetime_s, servers, budget_usd, settings: see `RunHeader`.

    Raises:
        RunStopped: another process has asked it to stop.
    """
    folder = folders.create(run_id)
    header = RunHeader(
        run_id=run_id,
        kind="profile",
        name=name,
        platform=platform,
        channel=channel,
        functions=1,
        memory_mb=memory_mb,
        lifetime_s=lifetime_s,
        servers=servers,
        prices=prices,
        budget_usd=budget_usd,
        settings=settings or {},
        ends_with_client=True,
    )
    task = asyncio.current_task()
    assert task is not None
    with driving(folder), living(folder, header, of=ProfileSummary) as run:
        run.begin()
        looking = asyncio.create_task(_cancelled_by_request(run, task))
        try:
            yield run
        except asyncio.CancelledError:
            if not run.is_to_stop:
                raise
            task.uncancel()
            raise RunStopped(run_id) from None
        finally:
            looking.cancel()
            shutil.rmtree(folder.objects, ignore_errors=True)


def keep(run: ClientRun, profile: Saves, out: Path | None) -> None:
    """Writes a profile into the folder of its run, and to `out`.

    Raises:
        JobError: it cannot be written.
    """
    written = run.folder.path / PROFILE_FILE
    write(profile, written)
    if out is not None:
        write(profile, out)
    run.more["profile"] = str((out or written).absolute())


def write(profile: Saves, path: Path) -> None:
    """Writes a profile.

    Raises:
        JobError: it cannot be written.
    """
    try:
        profile.save(path)
    except OSError as e:
        raise JobError(f"the profile cannot be written to {path}: {e.strerror}", remedy="give another --out") from None


async def _cancelled_by_request(run: ClientRun, task: asyncio.Task[Any]) -> None:
    while not run.is_to_stop:  # noqa: ASYNC110 - another process asks
        await asyncio.sleep(STOP_LOOK_S)
    task.cancel()
