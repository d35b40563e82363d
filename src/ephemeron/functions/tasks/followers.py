"""Followers: tasks that would be ready as soon as the latest result is recorded, and begin at once, with outputs that are still in memory.

An output has to be stored, and the result recorded, before another executor may read it. Where one task waits for another in a chain, all
functions would wait for stores and queue; the executor that has made the output need not. The request that records the result leases the
follower to it. Where it does not, or where another owner has stored another output or recorded its result first, what the follower made
is dropped: a result is recorded after its task was leased, and rests on what is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ephemeron.communication.channels.base import Channel, joined
from ephemeron.functions.tasks.model import TaskEdge, TaskLease, TaskSpec
from ephemeron.functions.tasks.object_places import digest_of_key
from ephemeron.functions.tasks.packing import batch_name
from ephemeron.functions.tasks.queue import TaskLeases, TaskQueue
from ephemeron.functions.tasks.resolver import Resolver
from ephemeron.functions.tasks.result_store import TaskOutputs


@dataclass(frozen=True, slots=True)
class Follower:
    """A task that has begun to follow another one."""

    after: str
    """Task that it follows."""
    edge: str
    """That will release it."""
    task: TaskSpec
    lease: TaskLease
    """That is hoped for."""
    own: Mapping[str, memoryview]
    """Its inputs that the task before it has made, by key."""
    leased: asyncio.Future[TaskLease | None]
    """Whether it is leased is known once the result of the task before it is recorded. None: it is not."""


class Followers:
    """Followers of the tasks that have ended at one executor and are not recorded.

    Args:
        queue: of the executor.
    """

    def __init__(self, queue: TaskLeases) -> None:
        self._queue = queue
        self._looking: dict[str, asyncio.Task[Follower | None]] = {}
        """By task that has ended."""

    @property
    def are_possible(self) -> bool:
        """Whether the queue can lease them."""
        return self._queue.leases_followers

    @property
    def are_open(self) -> bool:
        """Whether a task that has ended may have one and is not recorded."""
        return bool(self._looking)

    def look(self, task: TaskSpec, outputs: TaskOutputs, edges: asyncio.Task[Sequence[TaskEdge]]) -> asyncio.Task[Follower | None]:
        """Begins to look for a follower of a task.

        Args:
            task: that has ended.
            outputs: what it has made.
            edges: adds its edges.
        """
        found = self._looking[task.id] = asyncio.create_task(self._follower(task, outputs, edges))
        return found

    async def _follower(self, task: TaskSpec, outputs: TaskOutputs, edges: asyncio.Task[Sequence[TaskEdge]]) -> Follower | None:
        known = {edge.name: edge for edge in await edges if len(edge.tasks) == 1}
        waiting = await self._queue.waiting_for_one(list(known))
        edge = min((known[name] for name in waiting.edges), key=lambda edge: (edge.order, edge.name), default=None)
        if edge is None or (waiting.ready_order is not None and waiting.ready_order < edge.order):
            return None
        return Follower(
            after=task.id,
            edge=edge.name,
            task=edge.tasks[0],
            lease=TaskLease(batch=batch_name(edge.tasks, edge.order)[0], attempt=1, tasks=edge.tasks),
            own={key: memoryview(joined(buffers)) for key, buffers in outputs.objects.items()},
            leased=asyncio.get_running_loop().create_future(),
        )

    async def of(self, tasks: Iterable[str]) -> list[Follower]:
        """Those of tasks that are about to be recorded."""
        found = [await looking for task in tasks if (looking := self._looking.pop(task, None)) is not None]
        return [each for each in found if each is not None]

    def cancel(self) -> None:
        """Stops looking."""
        for looking in self._looking.values():
            looking.cancel()


class Following:
    """What follows from the results of tasks of a graph that is computed where it runs: edges, and inputs that no task will read.

    Args:
        queue: that counts.
        channel: of inputs.
        resolver: knows the graph.
    """

    def __init__(self, queue: TaskQueue, channel: Channel, resolver: Resolver) -> None:
        self._queue, self._channel, self._resolver = queue, channel, resolver

    async def connect(self, task: TaskSpec) -> Sequence[TaskEdge]:
        """Connects the edges to which a task counts that has begun, and that is recorded after this."""
        await asyncio.sleep(0)  # the compute thread begins first
        edges = self._resolver.edges(task)
        await self._queue.connect(*edges)
        return edges

    async def drop_inputs(self, tasks: Sequence[TaskSpec]) -> None:
        """Deletes the inputs that these tasks were the last to read. An executor that dies before it does leaves them to the end of
        the run."""
        await asyncio.gather(*(self._drop_inputs(task) for task in tasks))

    async def _drop_inputs(self, task: TaskSpec) -> None:
        readers = self._resolver.readers(task)
        unread = [key for key, number in readers.items() if number == 1]
        graph = task.id.partition("-")[0]  # another one of the same queue may read the same objects later
        shared = {f"read-{graph}-{digest_of_key(key)}": key for key, number in readers.items() if number > 1}
        if shared:
            sums = await self._queue.count_all({counter: readers[key] for counter, key in shared.items()}, task.id)
            unread += [key for counter, key in shared.items() if sums[counter] >= readers[key]]
        if unread:
            await self._channel.delete(unread)

    async def drop_late_outputs(self, tasks: Sequence[TaskSpec]) -> None:
        """Deletes what was stored for tasks that had a result already, where all that read it have ended: an executor that was frozen
        has stored it after it was deleted."""
        for task in tasks:
            if keys := await self._resolver.unread(task):
                await self._channel.delete(keys)
