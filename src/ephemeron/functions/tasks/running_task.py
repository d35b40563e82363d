"""A task from the view of its own code: it reports values while it runs, and learns that its client has cancelled it.

Values are events of the run, so they reach the client as all events do, and a later client reads them again. A cancellation is an object
that the client puts; it is looked for when the task asks, and by its executor as often as that renews its leases.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from ephemeron.communication.channels.base import Channel
from ephemeron.errors import ChannelError
from ephemeron.events import Event, TaskBegan, TaskReported

SEND_EVERY_S = 0.25
"""Least time between two reports that are sent: the client acts on each."""
LOOK_EVERY_S = 0.25
"""Least time between two looks for a cancellation: each is a request to the store."""
_LOOK_S = 10.0
"""Longest wait for its answer."""


def _is_in_a_loop() -> bool:
    """Whether an event loop runs in this thread, which would stand still while this waits for it."""
    return asyncio._get_running_loop() is not None


def cancel_key(run: str, task: str) -> str:
    """Key of the object that says that a task of a run is cancelled."""
    return f"{run}.cancelled/{task}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """How the tasks of a function report."""

    emit: Callable[[Event], None] = lambda event: None
    """Hands an event to the platform, in the loop of the function."""
    flush: Callable[[], None] = lambda: None
    """See `Context.flush`."""
    now: Callable[[], float] = lambda: 0.0
    """Seconds since the start of the run."""
    rank: int = 0
    attempt: int = 0


class RunningTask:
    """A task that runs. Its methods are called where the task computes, but for `look`.

    Args:
        id: of the task.
        run: its run.
        channel: of the run.
        reporting: of the function.
        loop: of the function.
    """

    def __init__(self, id: str, *, run: str, channel: Channel, reporting: Reporting, loop: asyncio.AbstractEventLoop) -> None:
        self.id = id
        self._key, self._channel, self._reporting, self._loop = cancel_key(run, id), channel, reporting, loop
        self._is_cancelled, self._look_at = False, 0.0
        self._reports, self._send_at = 0, 0.0

    def begin(self) -> None:
        """Says that it runs. Its client knows it afterwards, so that it knows which task has killed its function."""
        r = self._reporting
        began = TaskBegan(t=r.now(), rank=r.rank, attempt=r.attempt, task=self.id)
        if _is_in_a_loop():
            return r.emit(began)
        asyncio.run_coroutine_threadsafe(self._tell(began), self._loop).result(_LOOK_S)
        r.flush()

    def report(self, step: int, value: float) -> None:
        """Reports a value, without waiting for anything. It is sent, unless the latest one was sent less than `SEND_EVERY_S` ago."""
        self._reports += 1
        if time.monotonic() < self._send_at:
            return
        self._send_at = time.monotonic() + SEND_EVERY_S
        r = self._reporting
        self._emit(
            TaskReported(
                t=r.now(),
                rank=r.rank,
                attempt=r.attempt,
                task=self.id,
                number=self._reports,
                step=step,
                value=value if math.isfinite(value) else None,
            )
        )

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled it, as of the latest look. A look is a request to the store, and takes place every
        `LOOK_EVERY_S` at most; none does in virtual time, in which tasks compute while the loop stands still."""
        if not self._is_cancelled and not _is_in_a_loop() and time.monotonic() >= self._look_at:
            looking: Future[bool] = asyncio.run_coroutine_threadsafe(self.look(), self._loop)
            try:
                self._is_cancelled = looking.result(_LOOK_S)
            except (TimeoutError, ChannelError):  # the task goes on, and looks again
                looking.cancel()
            self._look_at = time.monotonic() + LOOK_EVERY_S
        return self._is_cancelled

    async def look(self) -> bool:
        """Whether the client has cancelled it; one request to the store.

        Raises:
            ChannelError: it does not answer.
        """
        return await self._channel.fetch(self._key) is not None

    async def _tell(self, event: Event) -> None:
        self._reporting.emit(event)

    def _emit(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._reporting.emit, event)
