"""What follows from the results of tasks of a graph that is computed where it runs: edges, and inputs that no task will read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ephemeron.communication.channels.base import Channel
from ephemeron.functions.tasks.model import TaskEdge, TaskSpec
from ephemeron.functions.tasks.object_places import digest_of_key
from ephemeron.functions.tasks.queue import TaskQueue
from ephemeron.functions.tasks.resolver import Resolver


class Following:
    """One executor's part in this.

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
