"""Graphs of tasks that the executors' functions compute: the client publishes the first tasks and counts results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field

from ephemeron.errors import TaskFailed
from ephemeron.executor.futures import TaskFuture
from ephemeron.functions.tasks.batch_state import failed_first
from ephemeron.functions.tasks.model import TaskResult, TaskSpec


@dataclass(slots=True, kw_only=True, eq=False)
class Graph:
    """A graph that runs, from the view of its client."""

    name: str
    """Ids of its tasks begin with `NAME-`."""
    tasks: int
    key: str
    """Of the object from which functions make the graph."""
    data: bytes
    objects: dict[str, bytes]
    """Code that it names."""
    starts: Iterator[tuple[TaskSpec, int]]
    """Tasks without inputs from others, and their order."""
    future: TaskFuture
    """Resolved with None."""
    on_result: Callable[[TaskResult], None]
    """Called with each success."""
    finished: int = 0
    _failed: bool = field(default=False)

    @property
    def is_done(self) -> bool:
        """Whether all its tasks have succeeded."""
        return self.finished == self.tasks

    @property
    def is_over(self) -> bool:
        """Whether it is done, has failed, or was cancelled."""
        return self.future.done()

    def next_starts(self, count: int) -> Iterator[list[tuple[TaskSpec, int]]]:
        """Tasks to publish, so many at once."""
        while some := list(itertools.islice(self.starts, count)):
            yield some

    def absorb(self, result: TaskResult) -> None:
        """Counts the final result of a task."""
        if self.is_over:
            return
        with contextlib.suppress(InvalidStateError):  # it was cancelled just now
            if result.status != "ok":
                result = failed_first(result)
                text = result.error or f"it is {result.status}"
                self.future.set_exception(TaskFailed(text, task=result.id, traceback=result.traceback, tries=result.tries))
                return
            self.finished += 1
            self.on_result(result)
            if self.is_done:
                self.future.set_result(None)
