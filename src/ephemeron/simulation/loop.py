"""Virtual time: an asyncio loop whose clock jumps to the next deadline instead of waiting for it.

Ordinary coroutines run unchanged; `loop.time()` is the virtual now. Ties are broken by the order of
scheduling, so two runs are the same to the last bit. Real sockets, threads and subprocesses do not fit in here.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from ephemeron.errors import EphemeronError

T = TypeVar("T")


class Deadlock(EphemeronError):
    """Every task waits for another one: no timer is left to advance the clock."""


class _NoSelector(selectors.SelectSelector):
    """Waits for nothing: the clock is moved instead."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("all tasks wait and nothing is scheduled")
        if timeout > 0:
            self.loop.jump()
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, starting at 0."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = _NoSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        """Moves the clock to the next timer that still matters."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0].cancelled():
            heapq.heappop(scheduled)._scheduled = False  # type: ignore[attr-defined]
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
        if scheduled:
            self._now = max(self._now, scheduled[0].when())


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
