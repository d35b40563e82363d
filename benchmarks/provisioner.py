"""A provisioner: starts as many executors as the depth of a queue demands, within the platform's concurrency and burst.

The product starts executors from its client (`ephemeron.executor`), which knows the tasks; this one knows the queue alone. Tests of the
queue and benchmarks of NumPyWren's scaling use it. It keeps no task and no result, so tasks outlive it: executors go on without it, and
another one, started at any time, sees the same queue.

NumPyWren (survey 2.4) keeps executors in proportion to the tasks in the queue, and lets them end when they find nothing. So does this
policy: the target follows the demand up at once, and down by half every `hold_s`. No executor is ended: one that finds no task
for its `idle_s` ends by itself, and one whose lifetime ends is replaced only up to the target. What is started but has not announced
itself counts as there for `start_s`, or a cold start would be answered with more starts.

Starts are limited by a token bucket: `burst` at once, `starts_per_s` after that. A refused start empties it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from ephemeron.config.typed import Count, MoreThan, NonNegative, Positive, Typed, Within, plain
from ephemeron.errors import InvocationRefused, JobError
from ephemeron.functions.base import Call
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.model import QueueDepth, number_of
from ephemeron.functions.tasks.queue import QueueDepths

_log = logging.getLogger(__name__)

_STARTS_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits(Typed):
    """Bounds and time constants of the policy."""

    most: Count
    """Executors, at most."""
    least: Annotated[int, Within(0, 1e9)] = 0
    """Executors while the queue is open."""
    tasks_per_executor: Positive = 1.0
    """Tasks in the queue for which one more executor is worth its start."""
    hold_s: NonNegative = 60.0
    """Seconds of lower demand before the target shrinks."""
    shrink: Annotated[float, Within(0, 1)] = 0.5
    """What is left of the target then."""
    burst: Count = 1000
    """Starts at once."""
    starts_per_s: Annotated[float, MoreThan(0)] = 100.0
    """Further starts."""
    start_s: Positive = 30.0
    """Seconds after which a start that has not announced itself is counted as failed."""

    def __post_init__(self) -> None:
        super(ScalingLimits, self).__post_init__()
        if self.least > self.most:
            raise JobError(f"least = {self.least} and most = {self.most} executors are not a range")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """Memory of the policy: plain numbers, so that a provisioner hands it to its successor. Times are the caller's."""

    target: int = 0
    lower_since: float | None = None
    """Since when the demand has been below the target."""
    tokens: float | None = None
    """Starts that are free now; None: as many as the burst."""
    tokens_at: float = 0.0
    next_number: int = 1
    """Of the next executor."""
    starting: Mapping[int, float] = field(default_factory=dict)
    """Executors that were started and have not announced themselves, and when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """What to do now."""

    start: tuple[int, ...]
    """Numbers of the executors to start."""
    state: ScalingState


def decide(limits: ScalingLimits, state: ScalingState, depth: QueueDepth, *, now: float) -> ScalingDecision:
    """The policy.

    Args:
        limits: of the platform and the user.
        state: from the previous decision.
        depth: of the queue; names of executors begin with their number and a dash.
        now: seconds; never less than before.
    """
    there = {number for number in map(number_of, depth.executors) if number is not None}
    starting = {number: since for number, since in state.starting.items() if number not in there and now - since < limits.start_s}
    demand = math.ceil(depth.tasks / limits.tasks_per_executor)
    floor = 0 if depth.closed and not depth.tasks else limits.least
    demand = min(max(demand, floor), limits.most)
    target, lower_since = _target(limits, state, demand, now)
    before = float(limits.burst) if state.tokens is None else state.tokens
    tokens = min(float(limits.burst), before + (now - state.tokens_at) * limits.starts_per_s)
    wanted = target if depth.tasks else floor
    n = max(0, min(wanted - len(depth.executors) - len(starting), math.floor(tokens)))
    numbers = tuple(range(state.next_number, state.next_number + n))
    return ScalingDecision(
        start=numbers,
        state=ScalingState(
            target=target,
            lower_since=lower_since,
            tokens=tokens - n,
            tokens_at=now,
            next_number=state.next_number + n,
            starting={**starting, **dict.fromkeys(numbers, now)},
        ),
    )


def refused(state: ScalingState, numbers: tuple[int, ...]) -> ScalingState:
    """The state after the platform has refused to start these executors."""
    starting = {number: since for number, since in state.starting.items() if number not in numbers}
    return replace(state, starting=starting, tokens=0.0)


def _target(limits: ScalingLimits, state: ScalingState, demand: int, now: float) -> tuple[int, float | None]:
    if demand >= state.target:
        return demand, None
    since = now if state.lower_since is None else state.lower_since
    if now - since < limits.hold_s:
        return state.target, since
    return max(demand, math.floor(state.target * limits.shrink)), now


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
