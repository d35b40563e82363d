"""Tasks: one sample to be loaded, its status and failures; and the queue of tasks without a loader.

The status table of DPFlow (section 3.4.1) knows ready, loading, done and failed. `SKIPPED` is a failure that the
job tolerates: the sample is left out and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, Literal, TypeVar

from ephemeron.errors import JobError

K = TypeVar("K", bound=Hashable)
"""Name of a task. Equal keys mean equal bytes: flow, version, epoch where the flow is random, and index."""


class TaskStatus(Enum):
    """Status of a task. Only `READY` and `LOADING` can still change."""

    READY = "ready"
    LOADING = "loading"
    DONE = "done"
    FAILED = "failed"
    SKIPPED = "skipped"

    @property
    def settled(self) -> bool:
        return self not in (TaskStatus.READY, TaskStatus.LOADING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRetryPolicy:
    """Treatment of a task that fails.

    A retry is immediate: back-off belongs to the code that reads from a store.
    """

    retries: int = 2
    """Attempts after the first one."""
    then: Literal["fail", "skip"] = "fail"
    """Treatment after the last attempt: the job fails, or the sample is skipped and counted."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise JobError(f"retries = {self.retries} is negative", remedy="give 0 to try once only")
        if self.then not in ("fail", "skip"):
            raise JobError(f"then = {self.then!r} is not known", remedy="give 'fail' or 'skip'")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure(Generic[K]):
    """A task that will not be tried again."""

    key: K
    status: TaskStatus
    """`FAILED` or `SKIPPED`."""
    reason: str
    """Message of the last failure."""


@dataclass(slots=True, eq=False)
class LoadTask(Generic[K]):
    """An entry of the status table."""

    key: K
    order: int
    """Order of submission: earlier tasks go first, also after a loss."""
    urgent: bool
    """Whether a trainer waits for it now."""
    policy: TaskRetryPolicy
    status: TaskStatus = TaskStatus.READY
    owner: str | None = None
    """The loader that has it. None: it is in the global queue, or settled."""
    holders: set[str] = field(default_factory=set)
    """Loaders that have it in their queue."""
    attempts: int = 0
    """Failures that are certainly its own."""
    suspect: bool = False
    """Whether a loader died that may have been working on it: from now on it is loaded alone."""


def rank(task: LoadTask[Any]) -> tuple[bool, int]:
    """Sort key: urgent before prefetched, then by order of submission."""
    return (not task.urgent, task.order)


class ReadyQueue(Generic[K]):
    """The global queue: urgent tasks before prefetched ones, then by order of submission.

    A heap whose void entries (removed, or raised to urgent) are skipped, and removed once they are the majority:
    push, pop and discard are O(log n) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int]] = []
        self._tasks: dict[int, LoadTask[K]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task: LoadTask[K]) -> bool:
        return self._tasks.get(task.order) is task

    def push(self, task: LoadTask[K]) -> None:
        """Puts a task in; one that was raised to urgent is put in again."""
        self._tasks[task.order] = task
        heapq.heappush(self._heap, rank(task))

    def discard(self, task: LoadTask[K]) -> None:
        """Takes a task out, if it is in."""
        self._tasks.pop(task.order, None)
        if len(self._heap) > 2 * len(self._tasks) + 64:
            self._heap = [rank(t) for t in self._tasks.values()]
            heapq.heapify(self._heap)

    def peek(self) -> LoadTask[K] | None:
        """The first task, left where it is."""
        while self._heap:
            task = self._tasks.get(self._heap[0][1])
            if task is not None and rank(task) == self._heap[0]:
                return task
            heapq.heappop(self._heap)
        return None

    def pop(self) -> LoadTask[K] | None:
        """The first task, taken out."""
        task = self.peek()
        if task is not None:
            heapq.heappop(self._heap)
            del self._tasks[task.order]
        return task
