"""Futures of tasks: those of `concurrent.futures`, so that its `wait` and `as_completed` take them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any


class TaskFuture(concurrent.futures.Future[Any]):
    """Result of a task that runs, or will run, in a function.

    Args:
        task: its id.
        name: of its function.
        on_cancel: called once when the future is cancelled, from the thread that cancels.
    """

    def __init__(self, task: str, *, name: str, on_cancel: Callable[[TaskFuture], None]) -> None:
        super().__init__()
        self.task, self.name = task, name
        self.tries = 0
        """Times that it ran, once it is done."""
        self.compute_s = 0.0
        """Seconds of its last try."""
        self.executor = ""
        """Name of the function that recorded its result."""
        self._on_cancel = on_cancel

    def cancel(self) -> bool:
        """Cancels the task unless it is done: it has no result any more, though a function may still compute it."""
        before = self.cancelled()
        if not super().cancel():
            return False
        if not before:
            self.set_running_or_notify_cancel()
            self._on_cancel(self)
        return True

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled() else "done" if self.done() else "pending"
        return f"<TaskFuture {self.task} of {self.name}, {state}>"
