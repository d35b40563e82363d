"""The provisioner: starts executors as the queue's depth asks for, for programs that use a queue without an executor of `ephemeron.executor`.

It keeps no task and no result, so tasks outlive it: executors go on without it, and another one, started at any time, sees the same queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from ephemeron.config.typed import plain
from ephemeron.errors import InvocationRefused
from ephemeron.functions.base import Call
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.model import QueueDepth
from ephemeron.functions.tasks.queue import QueueDepths
from ephemeron.functions.tasks.scaling import ScalingLimits, ScalingState, decide, refused

_log = logging.getLogger(__name__)

_STARTS_AT_ONCE = 32


class Provisioner:
    """Watches a queue.

    Args:
        queue: to watch.
        start: starts the executor of a number; raises `InvocationRefused` if the platform has no place for it.
        limits: of the platform and the user.
        poll_s: seconds between two looks at the queue.
        state: of the predecessor.
    """

    def __init__(
        self,
        queue: QueueDepths,
        start: Callable[[int], Awaitable[None]],
        limits: ScalingLimits,
        *,
        poll_s: float = 1.0,
        state: ScalingState | None = None,
    ) -> None:
        self.state = state or ScalingState()
        self.started = 0
        self.refused = 0
        self.depth = QueueDepth(ready=0, leased=0)
        """Latest."""
        self._queue, self._start, self._limits, self._poll_s = queue, start, limits, poll_s

    async def run(self, *, until: float = float("inf"), clock: Callable[[], float] | None = None) -> bool:
        """Starts executors until the queue is closed and empty. Returns whether it is.

        Args:
            until: loop time at which to stop.
            clock: seconds for the state, the same for successors; None: the loop's.
        """
        loop = asyncio.get_running_loop()
        clock = clock or loop.time
        while True:
            await self.step(clock())
            if self.depth.closed and not self.depth.tasks:
                return True
            left_s = until - loop.time()
            if left_s <= self._poll_s:
                return False
            await asyncio.sleep(self._poll_s)

    async def step(self, now: float) -> None:
        """One look and what follows from it."""
        self.depth = await self._queue.depth()
        decision = decide(self._limits, self.state, self.depth, now=now)
        self.state = decision.state
        failed: list[int] = []
        for at in range(0, len(decision.start), _STARTS_AT_ONCE):
            if failed:
                failed += decision.start[at : at + _STARTS_AT_ONCE]
                continue
            numbers = decision.start[at : at + _STARTS_AT_ONCE]
            ends = await asyncio.gather(*map(self._start, numbers), return_exceptions=True)
            for number, end in zip(numbers, ends, strict=True):
                if isinstance(end, InvocationRefused):
                    _log.info("executor %d was refused: %s", number, end)
                    failed.append(number)
                elif isinstance(end, BaseException):
                    raise end
                else:
                    self.started += 1
        if failed:
            self.refused += len(failed)
            self.state = refused(self.state, tuple(failed))


def executor_call(origin: Call, executor: ExecutorRequest, number: int, memory_mb: int, lifetime_s: float) -> Call:
    """The call of an executor.

    Args:
        origin: a call of the same run, whose channel and key it gets.
        executor: its request.
        number: becomes its rank; 1 and more.
        memory_mb, lifetime_s: its quotas.
    """
    return replace(
        origin,
        rank=number,
        attempt=0,
        memory_mb=memory_mb,
        lifetime_s=lifetime_s,
        entry="task-executor",
        reason="start",
        duplicate=False,
        request=plain(executor),
    )
