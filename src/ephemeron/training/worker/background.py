"""Named background tasks of a worker, at most one per name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class BackgroundTasks:
    """Tasks beside the training loop. A failure of one ends the task group, and with it the invocation.

    Args:
        tasks: group that owns the tasks.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._by_name: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, work: Coroutine[None, None, None]) -> None:
        """Starts a task under a name; an earlier one of that name goes on, but is forgotten."""
        self._by_name[name] = self._tasks.create_task(work)

    def start_after(self, name: str, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Like `start`, but the work begins when the earlier task of that name has ended."""
        self.start(name, _after(self._by_name.get(name), work))

    def is_free(self, name: str) -> bool:
        """Whether no task of that name is running."""
        task = self._by_name.get(name)
        return task is None or task.done()

    async def settle(self, name: str) -> None:
        """Waits for the task of that name, if it is running."""
        task = self._by_name.get(name)
        if task is not None and not task.done():
            await task

    def cancel(self, name: str) -> None:
        """Cancels the task of that name, if there is one."""
        task = self._by_name.pop(name, None)
        if task is not None:
            task.cancel()


async def _after(previous: asyncio.Task[None] | None, work: Callable[[], Coroutine[None, None, None]]) -> None:
    if previous is not None:
        await previous
    await work()
