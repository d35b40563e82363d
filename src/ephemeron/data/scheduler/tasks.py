"""One sample to be loaded: its status, its failures, and the queue of the tasks that no loader has.

The status table of DPFlow (section 3.4.1) knows ready, loading, done and failed. `SKIPPED` is a failure that the
job tolerates: the sample is left out and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from ephemeron.errors import JobError

Key: TypeAlias = Hashable
"""Name of a task. Equal keys mean equal bytes: flow, version, epoch where the flow is random, and index."""


class TaskStatus(Enum):
    """Status of a task. Only `READY` and `LOADING` change any more."""

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
    """Retries of a failed task, and the outcome when they are used up.

    A retry is immediate: backing off from an overloaded store is the task of its reader.
    """

    retries: int = 2
    """Attempts after the first one."""
    then: Literal["fail", "skip"] = "fail"
    """Outcome when they are used up: the job fails, or the sample is left out and counted."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise JobError(f"retries = {self.retries} is negative", remedy="give 0 to try once only")
        if self.then not in ("fail", "skip"):
            raise JobError(f"then = {self.then!r} is no way to end", remedy="give 'fail' or 'skip'")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailure:
    """A task that will not be tried again."""

    key: Key
    status: TaskStatus
    """`FAILED` or `SKIPPED`."""
    reason: str
    """Message of the last failure."""


@dataclass(slots=True, eq=False)
class Task:
    """An entry of the status table."""

    key: Key
    order: int
    """Order of submission: older tasks go first, also after a loss."""
    urgent: bool
    """A trainer waits for it now."""
    policy: TaskRetryPolicy
    status: TaskStatus = TaskStatus.READY
    owner: str | None = None
    """The loader in whose state it is. None: it is in the global queue, or settled."""
    holders: set[str] = field(default_factory=set)
    """Loaders that were told to load it and have not been told otherwise."""
    attempts: int = 0
    """Failures that are certainly its own."""
    suspect: bool = False
    """True after the death of a loader that may have been loading it: from now on it is loaded alone."""


def rank(task: Task) -> tuple[bool, int]:
    """Sort key: urgent before prefetched, then by order of submission."""
    return (not task.urgent, task.order)


class ReadyQueue:
    """The global queue: urgent tasks before prefetched ones, then by order of submission.

    A heap whose void entries (removed, or raised to urgent) are skipped, and removed once they are the majority:
    push, pop and discard are O(log n) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int]] = []
        self._tasks: dict[int, Task] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task: Task) -> bool:
        return self._tasks.get(task.order) is task

    def push(self, task: Task) -> None:
        """Adds a task; one that was raised to urgent is added again."""
        self._tasks[task.order] = task
        heapq.heappush(self._heap, rank(task))

    def discard(self, task: Task) -> None:
        """Removes a task, if present."""
        self._tasks.pop(task.order, None)
        if len(self._heap) > 2 * len(self._tasks) + 64:
            self._heap = [rank(t) for t in self._tasks.values()]
            heapq.heapify(self._heap)

    def peek(self) -> Task | None:
        """The first task, without removing it."""
        while self._heap:
            task = self._tasks.get(self._heap[0][1])
            if task is not None and rank(task) == self._heap[0]:
                return task
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Task | None:
        """The first task, which is removed."""
        task = self.peek()
        if task is not None:
            heapq.heappop(self._heap)
            del self._tasks[task.order]
        return task
