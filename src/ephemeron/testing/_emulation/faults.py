"""Faults that an emulator injects into its next calls, and tasks in its background."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass


@dataclass
class FaultConfig:
    """Counts of calls that are to fail, counted down."""

    deliver_twice: int = 0
    """Asynchronous calls that are delivered twice, at once, as when a queue's acknowledgement is lost."""
    throttle: int = 0
    """Requests that are refused with 429."""
    lose: int = 0
    """Calls that are accepted and never run, as when a queue that is kept in memory ends."""

    def take(self, name: str) -> bool:
        """Whether the next call has this fault; counts it down."""
        left: int = getattr(self, name)
        setattr(self, name, max(0, left - 1))
        return left > 0


class EmulatorTasks:
    """Tasks that no caller waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Starts a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """Cancels all tasks, and waits for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
