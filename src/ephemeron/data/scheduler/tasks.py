"""One sample to be loaded: how far it is, what it has done to loaders, and the queue of those nobody has yet.

The status table of DPFlow (section 3.4.1) knows ready, loading, done and failed. `SKIPPED` is a failure that the
job chose to live with: the sample is left out and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from ephemeron.errors import JobError

Key: TypeAlias = Hashable
"""What names a task. Equal keys mean equal bytes: flow, version, epoch where the flow is random, and index."""


class TaskStatus(Enum):
    """Where a task is. Only `READY` and `LOADING` change any more."""

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
    """What becomes of a task that fails.

    A retry is immediate: waiting out a store's bad minute belongs to whoever reads from it.
    """

    retries: int = 2
    """Attempts after the first one."""
    then: Literal["fail", "skip"] = "fail"
    """When they are used up: the job fails, or the sample is left out and counted."""

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
    """The last failure, in words."""


@dataclass(slots=True, eq=False)
class Task:
    """An entry of the status table."""

    key: Key
    order: int
    """Order of submission: who waits longer goes first, also after a loss."""
    urgent: bool
    """A trainer waits for it now."""
    policy: TaskRetryPolicy
    status: TaskStatus = TaskStatus.READY
    owner: str | None = None
    """The loader in whose mirror it is. None: it is in the global queue, or settled."""
    holders: set[str] = field(default_factory=set)
    """Loaders that were told of it and have not been told otherwise."""
    attempts: int = 0
    """Failures that are certainly its own."""
    suspect: bool = False
    """A loader died that may have been at it: from now on it is loaded alone."""


def rank(task: Task) -> tuple[bool, int]:
    """What comes first is smaller: urgent before prefetched, then by order of submission."""
    return (not task.urgent, task.order)


class ReadyQueue:
    """The global queue: what a trainer waits for before what is prefetched, then by order of submission.

    A heap whose void entries (removed, or raised to urgent) are passed over, and cleared out once they are most
    of it: push, pop and discard are O(log n) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int]] = []
        self._tasks: dict[int, Task] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task: Task) -> bool:
        return self._tasks.get(task.order) is task

    def push(self, task: Task) -> None:
        """Puts a task in; one that was raised to urgent is put in again."""
        self._tasks[task.order] = task
        heapq.heappush(self._heap, rank(task))

    def discard(self, task: Task) -> None:
        """Takes a task out, if it is in."""
        self._tasks.pop(task.order, None)
        if len(self._heap) > 2 * len(self._tasks) + 64:
            self._heap = [rank(t) for t in self._tasks.values()]
            heapq.heapify(self._heap)

    def peek(self) -> Task | None:
        """The first task, left where it is."""
        while self._heap:
            task = self._tasks.get(self._heap[0][1])
            if task is not None and rank(task) == self._heap[0]:
                return task
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Task | None:
        """The first task, taken out."""
        task = self.peek()
        if task is not None:
            heapq.heappop(self._heap)
            del self._tasks[task.order]
        return task
