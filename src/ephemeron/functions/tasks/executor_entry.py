"""The entry `task-executor`: an executor as a function."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from ephemeron.communication.channels import open_channel
from ephemeron.config.typed import NonNegative, Positive
from ephemeron.events import Traffic
from ephemeron.functions.context import Context
from ephemeron.functions.tasks.executor import TaskExecutor
from ephemeron.functions.tasks.executor_options import ExecutorOptions
from ephemeron.functions.tasks.object_keys import QueueKeys
from ephemeron.functions.tasks.object_places import ObjectPlaces
from ephemeron.functions.tasks.open_queue import Adapter, open_queue, queue_channel
from ephemeron.functions.tasks.resolver import ResolverContext, open_resolver
from ephemeron.functions.tasks.running_task import Reporting
from ephemeron.units import MB


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRequest:
    """Arguments of the entry `task-executor`."""

    queue: str
    adapter: Adapter = "objects"
    resolver: str = "modules"
    """Name in `resolver`'s table."""
    functions: tuple[str, ...] = ()
    """For the resolver `modules`: modules, and `module:function`s, that tasks may run."""
    lease_s: Positive = 30.0
    """Of all users of the queue."""
    idle_s: NonNegative = 10.0
    flush_s: NonNegative = 1.0
    poll_s: Positive = 1.0
    margin_s: NonNegative = 3.0
    one_at_a_time: bool = False
    """See `ExecutorOptions`."""
    cache_mb: NonNegative = 0.0
    """MB of objects of other stores that are kept in memory (`object_places`), and as many of inputs that several tasks have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorResult:
    """Result of the entry `task-executor`."""

    outcome: str
    """Why it ended: `idle`, `closed`, `deadline` or `stuck`."""
    taken: int
    recorded: int
    failed: int
    dropped: int
    batches: int
    compute_s: float
    idle_s: float
    traffic: Traffic = field(default_factory=Traffic)


def executor_name(rank: int, invocation: str) -> str:
    """Name of an executor at its queue. It begins with the rank of its call, by which the provisioner knows it."""
    return f"{rank}-{re.sub('[^A-Za-z0-9_-]', '-', invocation)}"


async def run_task_executor(ctx: Context, request: ExecutorRequest) -> ExecutorResult:
    """Takes and runs tasks until none is left, or the lifetime nears."""
    name, loop = executor_name(ctx.call.rank, ctx.invocation), asyncio.get_running_loop()
    own = queue_channel(ctx.channel, request.queue, owner=f"{name}-data", key=ctx.call.key)
    channel = ObjectPlaces(own, owner=f"{name}-data", open_channel=open_channel, cache_bytes=int(request.cache_mb * MB))
    queue = open_queue(ctx.channel, request.queue, owner=name, key=ctx.call.key, adapter=request.adapter, lease_s=request.lease_s)
    resolver = open_resolver(
        request.resolver,
        ResolverContext(
            channel=channel,
            run=ctx.call.run,
            key=ctx.call.key,
            functions=request.functions,
            scratch=ctx.scratch,
            reporting=Reporting(
                emit=ctx.emit, flush=ctx.flush, now=lambda: loop.time() - ctx.origin, rank=ctx.call.rank, attempt=ctx.call.attempt
            ),
        ),
    )
    options = ExecutorOptions(
        idle_s=request.idle_s,
        flush_s=request.flush_s,
        poll_s=request.poll_s,
        one_at_a_time=request.one_at_a_time,
        margin_s=request.margin_s,
        keep_bytes=int(request.cache_mb * MB),
    )
    executor = TaskExecutor(
        queue, channel, resolver, ctx.compute, name=name, deadline=ctx.deadline, data_prefix=QueueKeys(request.queue).data, options=options
    )
    try:
        totals = await executor.run()
    finally:
        await queue.close()
        await channel.close_stores()
    return ExecutorResult(
        outcome=totals.ended_by,
        taken=totals.taken,
        recorded=totals.recorded,
        failed=totals.failed,
        dropped=totals.dropped,
        batches=totals.batches,
        compute_s=totals.compute_s,
        idle_s=totals.idle_s,
        traffic=own.traffic + channel.traffic + queue.traffic,
    )
