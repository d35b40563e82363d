"""Writes of a region's rank 0 that training does not wait for.

What a region stores of an exchange is needed by a replacement only, so training goes on while it is written. The writes of one lane are done one after the
other: what is stored at any time is a beginning of what was done, and a request that tells another region or another function of something follows the writes
that it rests on. Who relies on all of them, a checkpoint for one, calls `settle` first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable


class BackgroundWrites:
    """Writes in their order, each begun when the one before has ended. After one that has failed none is begun."""

    def __init__(self) -> None:
        self._tasks: deque[asyncio.Task[None]] = deque()

    def add(self, write: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Does a write after all before it; the task ends with it."""
        before = self._tasks[-1] if self._tasks else None
        task = asyncio.create_task(_after(before, write))
        self._tasks.append(task)
        return task

    async def settle(self, *, but: int = 0) -> None:
        """Waits until all are done, or all but the latest ones.

        Args:
            but: number of the latest ones that may go on.

        Raises:
            EphemeronError: as one of them.
        """
        while self._tasks and (self._tasks[0].done() or len(self._tasks) > but):
            first = self._tasks[0]
            await asyncio.shield(first)
            if self._tasks and self._tasks[0] is first:
                self._tasks.popleft()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ends those that are not done; returns what is to be awaited."""
        for task in self._tasks:
            task.cancel()
        return list(self._tasks)


async def _after(before: asyncio.Task[None] | None, write: Callable[[], Awaitable[None]]) -> None:
    if before is not None:
        await before
    await write()
