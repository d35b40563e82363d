"""What follows from the results of tasks of a graph that is computed where it runs: edges, and inputs that no task will read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ephemeron.communication.channels.base import Channel
from ephemeron.functions.tasks.model import TaskSpec
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

    async def connect(self, task: TaskSpec) -> None:
        """Connects edges to which a task counts that has begun, and that is recorded after this."""
        await asyncio.sleep(0)  # the compute thread begins first
        await asyncio.gather(*(self._queue.connect(edge) for edge in self._resolver.edges(task)))

    async def drop_inputs(self, tasks: Sequence[TaskSpec]) -> None:
        """Deletes the inputs that these tasks were the last to read. An executor that dies before it does leaves them to the end of
        the run."""
        read = [(task, key, readers) for task in tasks for key, readers in self._resolver.readers(task).items()]
        await asyncio.gather(*(self._drop(*each) for each in read))

    async def _drop(self, task: TaskSpec, key: str, readers: int) -> None:
        graph = task.id.partition("-")[0]  # another one of the same queue may read the same objects later
        counter = f"read-{graph}-{digest_of_key(key)}"
        if readers == 1 or await self._queue.count(counter, task.id, last=readers) >= readers:
            await self._channel.delete([key])

    async def drop_late_outputs(self, tasks: Sequence[TaskSpec]) -> None:
        """Deletes what was stored for tasks that had a result already, where all that read it have ended: an executor that was frozen
        has stored it after it was deleted."""
        for task in tasks:
            if keys := await self._resolver.unread(task):
                await self._channel.delete(keys)
