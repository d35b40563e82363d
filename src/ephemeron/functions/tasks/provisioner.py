"""The provisioner: starts executors as the queue's depth asks for. Runs in a client, or as a function that hands over.

It keeps no task and no result, so tasks outlive it: executors go on without it, and another one, started at any time, sees the same queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from ephemeron.config.typed import Count, NonNegative, Positive, build, plain
from ephemeron.errors import InvocationRefused, KeyExists
from ephemeron.events import Traffic
from ephemeron.functions.base import Call
from ephemeron.functions.context import Context
from ephemeron.functions.tasks.executor_entry import ExecutorRequest, executor_name
from ephemeron.functions.tasks.model import QueueDepth
from ephemeron.functions.tasks.open_queue import open_queue, queue_channel
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionerRequest:
    """Arguments of the entry `provisioner`."""

    executor: ExecutorRequest
    """Of the executors; names the queue."""
    limits: ScalingLimits
    memory_mb: Count
    """Of an executor."""
    lifetime_s: Positive
    """Of an executor."""
    poll_s: Positive = 1.0
    margin_s: NonNegative = 5.0
    """Seconds before its deadline at which it hands over."""
    state: Mapping[str, object] = field(default_factory=dict)
    """`ScalingState` of the predecessor; empty: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionerResult:
    """Result of the entry `provisioner`."""

    outcome: str
    """`finished`, `relayed` to a successor, or `stepped aside` for another invocation of the same call."""
    started: int = 0
    refused: int = 0
    traffic: Traffic = field(default_factory=Traffic)


async def run_provisioner(ctx: Context, request: ProvisionerRequest) -> ProvisionerResult:
    """Starts executors until the queue is closed and empty; hands over before its deadline."""
    call, name = ctx.call, executor_name(ctx.call.rank, ctx.invocation)
    channel = queue_channel(ctx.channel, request.executor.queue, owner=f"{name}-data", key=call.key)
    try:  # a call that is delivered twice provisions once
        await channel.put(f"{request.executor.queue}.provisioner/{call.attempt}", [name.encode()], create=True)
    except KeyExists:
        return ProvisionerResult(outcome="stepped aside", traffic=channel.traffic)
    queue = open_queue(
        ctx.channel,
        request.executor.queue,
        owner=f"provisioner-{name}",
        key=call.key,
        adapter=request.executor.adapter,
        lease_s=request.executor.lease_s,
    )

    async def start(number: int) -> None:
        await ctx.invoke(executor_call(call, request.executor, number, request.memory_mb, request.lifetime_s))

    state = build(ScalingState, request.state, where="state of the predecessor")
    provisioner = Provisioner(queue, start, request.limits, poll_s=request.poll_s, state=state)
    loop = asyncio.get_running_loop()
    try:
        is_finished = await provisioner.run(until=ctx.deadline - request.margin_s, clock=lambda: loop.time() - ctx.origin)
    finally:
        await queue.close()
    if not is_finished:
        told = replace(request, state=plain(provisioner.state))
        successor = replace(call, attempt=call.attempt + 1, reason="relay", request=plain(told))
        await ctx.invoke(successor)
    return ProvisionerResult(
        outcome="finished" if is_finished else "relayed",
        started=provisioner.started,
        refused=provisioner.refused,
        traffic=channel.traffic + queue.traffic,
    )


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
