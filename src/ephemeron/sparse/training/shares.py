"""The functions of a run: one for each share of the minibatches, and those that go on for functions that were lost or whose time is up."""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from ephemeron import errors
from ephemeron.config.typed import build
from ephemeron.errors import (
    ChannelError,
    FunctionFailed,
    JobError,
    LinkFailed,
    PlatformError,
    RpcError,
    RunFailed,
    ServiceRefused,
    ServiceUnreachable,
    TaskFailed,
)
from ephemeron.runs.function_set import Fail, FunctionSet
from ephemeron.sparse.store import SparseStore
from ephemeron.sparse.training.part import Part, PartReport, progress_key, stop_key

_log = logging.getLogger(__name__)

LOOK_S = 0.2
_PASSING = (OSError, ChannelError, LinkFailed, PlatformError, RpcError, ServiceRefused, ServiceUnreachable)
"""What the world did. A function that ends with another error would do so again: its data or its code are wrong."""
PartEnd = Literal["finished", "handed over", "lost", "cancelled"]


class PartTask(Protocol):
    """A function that trains a share: a future of its last report."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def cancel(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> PartReport: ...


class ShareWatcher:
    """What is told of the functions of a run; does nothing."""

    def submitted(self, part: Part, task: PartTask) -> None:
        """A function is to go on with a share."""

    def ended(self, part: Part, task: PartTask, end: PartEnd, error: str) -> None:
        """It has ended; `error` says why it was lost."""

    def reported(self, reports: Sequence[PartReport]) -> None:
        """The latest reports of the shares that have one, by rank. Called about every `LOOK_S` seconds."""


class Shares:
    """The shares of a run while they are trained.

    Args:
        start: starts a function, which is tried once.
        store: the client's connection.
        parts: by rank, before their first attempt.
        watcher: told of everything.
        check: called now and then; what it raises ends the run.
    """

    def __init__(
        self,
        start: Callable[[Part], PartTask],
        store: SparseStore,
        parts: Sequence[Part],
        watcher: ShareWatcher,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._start, self._store, self._watcher, self._check = start, store, watcher, check
        self._session = secrets.token_hex(8)
        self._parts = [replace(part, session=self._session) for part in parts]
        self._running: dict[int, PartTask] = {}
        self._reports: dict[int, PartReport] = {}
        self._lost = 0
        self._set = FunctionSet()
        self._stopping = self._cancelled = False

    @property
    def lost(self) -> int:
        """Functions that were lost."""
        return self._lost

    @property
    def complete(self) -> bool:
        """Whether all shares are trained to their end."""
        return len(self._reports) == len(self._parts) and all(report.finished for report in self._reports.values())

    def stop(self) -> None:
        """Ends all functions at their next report; the run can go on from there."""
        self._stopping = True
        self._set.stop()

    def cancel(self) -> None:
        """Ends all functions at once; the run can go on from their last reports."""
        self.stop()
        self._cancelled = True
        for task in list(self._running.values()):
            task.cancel()

    async def trained(self) -> list[PartReport]:
        """Trains all shares to their end, or until `stop` or `cancel`; returns their last reports, by rank.

        Raises:
            JobError: the fault is the user's.
            RunFailed: functions of one share were lost again and again.
        """
        for part in list(self._parts):
            found = await self._stored(part)
            attempt = part.attempt if found is None else max(part.attempt, found.attempt + 1)
            if found is None or not found.finished:
                self._set.keep(part.rank, attempt)
        self._step()
        told = False
        try:
            while self._running:
                await asyncio.sleep(LOOK_S)
                self._check()
                if self._stopping and not told:
                    told = True
                    await self._store.set(stop_key(self._parts[0].run), self._session.encode())
                await self._tell()
                for rank, task in list(self._running.items()):
                    if task.done():
                        self._ended(self._parts[rank], task)
                self._step()
            await self._tell()
        finally:
            for task in self._running.values():
                task.cancel()
        return [self._reports[part.rank] for part in self._parts if part.rank in self._reports]

    def _step(self) -> None:
        for action in self._set.decide(0.0):
            if isinstance(action, Fail):
                text = f"share {action.slot}: {action.losses} functions in a row have ended without a step, the last one by: {action.cause}"
                raise RunFailed(self._parts[action.slot].run, [text])
            part = self._parts[action.slot] = replace(self._parts[action.slot], attempt=action.attempt)
            task = self._running[part.rank] = self._start(part)
            self._watcher.submitted(part, task)

    def _ended(self, part: Part, task: PartTask) -> None:
        del self._running[part.rank]
        if task.cancelled():
            self._set.ended(part.rank, "cancelled")
            return self._watcher.ended(part, task, "cancelled", "")
        error = task.exception()
        if error is None:
            report = task.result()
            self._reports[part.rank] = report
            self._watcher.reported([report])
            self._watcher.ended(part, task, "finished" if report.finished else "handed over", "")
            self._set.progressed(report.steps, part.rank)
            self._set.ended(part.rank, "done" if report.finished else "unfinished", "its time was up")
            return None
        self._watcher.ended(part, task, "lost", str(error))
        for cause in (error, error.__cause__):
            if isinstance(cause, JobError):
                raise cause
        if not _may_pass(error):
            raise RunFailed(part.run, [f"share {part.rank}: {error}"]) from error
        self._lost += 1
        _log.warning("share %d: its function was lost, another one goes on (%s)", part.rank, error)
        if (known := self._reports.get(part.rank)) is not None:
            self._set.progressed(known.steps, part.rank)
        self._set.ended(part.rank, "lost", str(error))
        return None

    async def _tell(self) -> None:
        for part in self._parts:
            found = await self._stored(part)
            if found is not None:
                self._reports[part.rank] = found
        self._watcher.reported([self._reports[rank] for rank in sorted(self._reports)])

    async def _stored(self, part: Part) -> PartReport | None:
        data = await self._store.get(progress_key(part.run, part.rank))
        return None if data is None else build(PartReport, json.loads(data), where="progress")


def _may_pass(error: BaseException) -> bool:
    """Whether another function may do better: nothing raised in this one, or what the world did to it."""
    if isinstance(error, TaskFailed):
        if not error.traceback:  # it was killed
            return True
        text = str(error)
    elif isinstance(error, FunctionFailed):
        text = error.problem
    else:
        return True
    name = text.partition(":")[0].strip()
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, _PASSING)
