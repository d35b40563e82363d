"""Tasks: one sample to be loaded, its status and failures; and the queue of tasks without a loader.

The status table of DPFlow (section 3.4.1) knows ready, loading, done and failed. `SKIPPED` is a failure that the
job tolerates: the sample is left out and counted.

The loader's side of QMOWS: its local queue (DPFlow section 3.4.1, algorithm 3.3).

As printed, the algorithm pauses during each request, which makes a window of K > N useless, and repeats requests without pause when
there is no work. Here a loader continues with its queue while a request is under way (with K >= 2 N it never pauses), and the service
answers a request of a loader without work when there is some. Results that were not acknowledged are at most 2 N: N in the request,
N made meanwhile.

A reply holds the *whole* queue of the loader, so a lost, repeated or late reply is harmless: only the answer to the
request under way counts, and it replaces the queue.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
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


# -- state of a loader in QMOWS -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of QMOWS."""

    window: int = 16
    """K: tasks in a loader's queue. 2 N or more keep a loader busy during a request."""
    batch: int = 4
    """N: results in a request. A loader with fewer tasks than this steals from others."""
    copies: int = 2
    """Loaders that may have the same task at a time."""
    lease_s: float = 10.0
    """A loader without a heartbeat or request for this long is given up."""
    stuck_s: float = 120.0
    """A loader that has work and makes no request for this long is given up, also if it sends heartbeats."""
    unresponsive_s: float = 1.0
    """All work can be stolen from a loader that has some and makes no request for this long."""

    def __post_init__(self) -> None:
        for name in ("window", "batch", "copies"):
            if getattr(self, name) < 1:
                raise JobError(f"{name} = {getattr(self, name)} is below 1", remedy="give 1 or more")
        for name in ("lease_s", "stuck_s", "unresponsive_s"):
            if not getattr(self, name) > 0:
                raise JobError(f"{name} = {getattr(self, name)} is not above 0", remedy="give seconds above 0")


@dataclass(slots=True, eq=False)
class LoaderState(Generic[K]):
    """The tasks of a loader, as far as the scheduler knows."""

    loader: str
    heard_at: float
    asked_at: float
    """Time of its last request, or of the late answer to it."""
    request: int = 0
    """The newest request that was processed."""
    holding: bool = False
    """Whether the answer to that request is held back until there is work."""
    committed: list[K] = field(default_factory=list)
    """The loader's queue in the last reply, including tasks that were stolen or settled since."""
    uncommitted: dict[K, LoadTask[K]] = field(default_factory=dict)
    """Tasks reserved for this loader that are not in its queue."""
    in_hand: set[K] = field(default_factory=set)
    """All tasks that it may be working on or have queued: a superset of `committed`, renewed by each report."""
    load: int = 0
    """Tasks owned, committed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReply(Generic[K]):
    """The reply to a loader."""

    request: int
    tasks: tuple[K, ...] = ()
    """The loader's whole new queue, in order."""
    accepted: tuple[K, ...] = ()
    """Results to keep. All others in the request are dropped: another loader was faster, or they are not needed any more."""
    failures: tuple[TaskFailure[K], ...] = ()
    hold: bool = False
    """Whether there is no work: reply when `idle_loaders` has the loader and `assign` has work for it."""
    rejoin: bool = False
    """Whether it had been given up (its results were used all the same): add it again, and repeat its request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses(Generic[K]):
    """Loaders that were given up, and tasks that failed by that."""

    loaders: tuple[str, ...]
    failures: tuple[TaskFailure[K], ...]


# -- the loader's side of QMOWS -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport(Generic[K]):
    """One request of a loader: finished and failed tasks; it asks for more."""

    request: int
    """Counted from 1 by each loader; a repeated request keeps its number."""
    done: tuple[K, ...] = ()
    """Tasks whose results come with the request."""
    failed: Mapping[K, str] = field(default_factory=dict)
    """Tasks that raised, and their errors."""
    running: K | None = None
    """The task that was running when the request was made."""


class LoaderQueue(Generic[K]):
    """Local queue, results not yet reported, and at most one request under way.

    Loop of the caller: `take` and work; `finish` or `fail`; send the result of `report`; `sync` with the answer.

    Args:
        batch: N, results in a request.
    """

    def __init__(self, *, batch: int) -> None:
        self.batch = batch
        self.running: K | None = None
        self.under_way: LoaderReport[K] | None = None
        """The request whose answer is awaited; repeat it as it is if none comes."""
        self._queue: deque[K] = deque()
        self._done: list[K] = []
        self._failed: dict[K, str] = {}
        self._requests = 0

    def take(self) -> K | None:
        """The next task to work on. None: wait for `sync`."""
        if self.running is None and self._queue and self._unreported < self.batch:
            self.running = self._queue.popleft()
            return self.running
        return None

    def coming(self, count: int) -> tuple[K, ...]:
        """The tasks to be taken next, at most so many."""
        return tuple(islice(self._queue, count))

    def finish(self) -> None:
        """Records that the running task has a result, which the caller keeps until the request with it was answered."""
        self._done.append(self._taken())

    def fail(self, reason: str) -> None:
        """Records that the running task raised."""
        self._failed[self._taken()] = reason

    def report(self) -> LoaderReport[K] | None:
        """The request to send now, if one is due: after N results, or when there is nothing left to do."""
        idle = self.running is None and not self._queue
        if self.under_way is not None or not (idle or self._unreported >= self.batch):
            return None
        self._requests += 1
        self.under_way = LoaderReport(request=self._requests, done=tuple(self._done), failed=self._failed, running=self.running)
        self._done, self._failed = [], {}
        return self.under_way

    def sync(self, request: int, tasks: Sequence[K]) -> bool:
        """Takes over the queue in a reply. False: not the answer to the request under way, and ignored."""
        if self.under_way is None or request != self.under_way.request:
            return False
        self.under_way = None
        known = {*self._done, *self._failed, self.running}
        self._queue = deque(key for key in tasks if key not in known)
        return True

    def _taken(self) -> K:
        """The running task, which runs no longer."""
        key, self.running = self.running, None
        assert key is not None, "`take` comes first"
        return key

    @property
    def _unreported(self) -> int:
        return len(self._done) + len(self._failed)
