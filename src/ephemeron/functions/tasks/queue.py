"""The ports `TaskQueue` and `ResultReader`, implemented by objects of any channel and by Redis or Valkey."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from ephemeron.events import Traffic
from ephemeron.functions.tasks.model import QueueDepth, TaskEdge, TaskLease, TaskResult, TaskSpec, WaitingEdges


class ResultReader(ABC):
    """One reader's position in the results of a queue."""

    damaged: str = ""
    """Key of the first object with results that could not be read. Its tasks run again, unless they were all done."""

    @abstractmethod
    async def read(self) -> list[TaskResult]:
        """Final results that this reader has not seen, each task once. Does not wait for any."""


class QueueDepths(ABC):
    """What is in a queue."""

    lease_s: float
    """Seconds without renewal after which a lease ends. The same for all users of a queue."""
    notifies: bool = False
    """Whether `wait_for_work` and `wait_until_empty` end as soon as that happens; else they only let time pass."""

    @abstractmethod
    async def depth(self) -> QueueDepth:
        """What is in the queue."""

    @abstractmethod
    async def published(self) -> dict[str, str]:
        """Tasks in the queue that have no final result, and the batch of each."""


class TaskLeases(QueueDepths):
    """An executor's side: batches that it leases, and results that it records."""

    owner: str
    """Name of this process, unlike every other's at this queue."""
    is_drained: bool = False
    """The latest `take` found the queue closed and empty."""
    leases_followers: bool = False
    """Whether `complete_and_follow` leases what it releases; else it leases nothing, and `waiting_for_one` finds nothing."""

    @abstractmethod
    async def take(self, n: int, *, is_busy: bool = False) -> list[TaskLease]:
        """Leases batches until they hold `n` tasks, or no more are ready. Never waits for any.

        A queue that knows the number of executors gives each its share: at least one batch, and no more than are ready divided by the
        executors that are announced.

        Args:
            n: tasks.
            is_busy: the caller has a task to run: one batch is left for each other executor, where the queue knows their number.
        """

    @abstractmethod
    async def renew(self, leases: Sequence[TaskLease]) -> list[TaskLease]:
        """Prolongs leases by `lease_s` from now. Returns those that are lost: their batch is another owner's, or complete."""

    @abstractmethod
    async def complete(self, lease: TaskLease, results: Sequence[TaskResult]) -> list[TaskResult]:
        """Records results; on return they are stored. Releases edges, and removes the batch if it is complete.

        Args:
            lease: of their batch; it may be lost.
            results: `ok` or `failed`. The last allowed failed try is recorded as `dead`.

        Returns:
            The results as recorded; without those of tasks that had a final result already.
        """

    async def waiting_for_one(self, edges: Sequence[str]) -> WaitingEdges:
        """Those of the edges that lack one input only. If a task that names them has ended and is not recorded, it is this one."""
        return WaitingEdges()

    async def complete_and_follow(
        self, lease: TaskLease, results: Sequence[TaskResult], edges: Sequence[str]
    ) -> tuple[list[TaskResult], list[TaskLease]]:
        """As `complete`, and leases the batches of these edges that it releases, unless others have taken them."""
        return await self.complete(lease, results), []

    async def wait_for_work(self, seconds: float) -> bool:
        """Until a batch may have become ready, or for so many seconds, at most 20. Returns whether one has."""
        await asyncio.sleep(seconds)
        return False

    @abstractmethod
    async def release(self, lease: TaskLease) -> None:
        """Gives a lease back, so that others may take the rest of its tasks at once. Harmless if it is lost or complete."""

    @abstractmethod
    async def announce(self, executor: str, *, gone: bool = False) -> None:
        """Counts an executor in `depth().executors` for `lease_s` from now, or no longer."""


class TaskPublisher(QueueDepths):
    """A client's side: batches and edges that it adds, and their results."""

    @abstractmethod
    async def publish(self, tasks: Sequence[TaskSpec], *, order: int = 0) -> str:
        """Adds one batch and returns its name, which depends on its content and order alone.

        Args:
            tasks: at least one; they are leased together, so they should take a second or so in all.
            order: batches of lower order are taken first, roughly; 0 to 99,999,999.

        Raises:
            JobError: no task, two of one id, or an id that is no name.
        """

    @abstractmethod
    async def connect(self, *edges: TaskEdge) -> None:
        """Adds edges. To be called before tasks that name them are published; the same edge twice is one edge.

        Raises:
            JobError: as `publish`.
        """

    @abstractmethod
    async def cancel(self, batch: str, ids: Iterable[str]) -> list[str]:
        """Records tasks as cancelled unless they have a final result. Their executor may still run them.

        Returns:
            Ids that are cancelled now, or were before.
        """

    @abstractmethod
    async def finish(self) -> None:
        """Marks the queue closed: executors end when it is empty."""

    @abstractmethod
    def reader(self) -> ResultReader:
        """A reader from the first result on."""

    @abstractmethod
    async def clear(self) -> None:
        """Removes everything of this queue from the store, results stored under its own keys included."""

    async def wait_until_empty(self, seconds: float) -> bool:
        """Until the last ready or leased batch is complete, or for so many seconds, at most 20. Returns whether that has happened since the
        latest call that returned true."""
        await asyncio.sleep(seconds)
        return False

    async def publish_all(self, tasks: Sequence[TaskSpec], *, per_batch: int, order: int = 0) -> list[str]:
        """Publishes tasks in batches of `per_batch`, in their order, and returns the batches' names."""
        parts = [tasks[at : at + per_batch] for at in range(0, len(tasks), per_batch)]
        return [await self.publish(part, order=order + n) for n, part in enumerate(parts)]


class TaskCounters(ABC):
    """Counters of a queue, each member of which counts once."""

    @abstractmethod
    async def count(self, counter: str, member: str, amount: int = 1, *, last: int | None = None) -> int:
        """Sets the amount of a member of a counter, once and for all, and returns the sum over its members.

        Args:
            counter: its name.
            member: of it.
            amount: of the member; another one for the same member is ignored.
            last: sum at which the counter is not needed any more: once it is reached the counter is removed, at once or within minutes,
                so that counters that have ended do not take room in the store. A member that is set after that begins a new counter.
        """

    async def count_all(self, last: Mapping[str, int], member: str) -> dict[str, int]:
        """`count` for several counters, each with its last sum, and amount 1: sums by counter."""
        sums = await asyncio.gather(*(self.count(name, member, last=at) for name, at in last.items()))
        return dict(zip(last, sums, strict=True))


class TaskQueue(TaskLeases, TaskPublisher, TaskCounters):
    """Tasks, in batches that are leased, and their results.

    Contract, held by `ephemeron.testing.TaskQueueContract` for every implementation:

    - a batch is published whole or not at all; the same batch published twice is one batch.
    - every task gets exactly one final result, however often it runs, and all readers see the same one. It is decided by
      the first `complete` that records it, not by who holds the lease.
    - a batch leaves the queue only after each of its tasks has a final result that is stored.
    - a lease ends when its owner has not renewed it for `lease_s`; then another `take` gets its unfinished tasks. An
      owner that is late can still record results that are not there yet.
    - a task that failed `max_tries` times is dead, with the error and traceback of the last try. So is one that was the
      first without a result each time when executors vanished.
    - the tasks of an edge are released when all its inputs are recorded as `ok`, and are not run again once they
      have a result; if an input dies or is cancelled, they are dead.

    One object serves one owner and one event loop. All methods raise `ChannelUnreachable` when the store does not answer.
    """

    @abstractmethod
    def key_of(self, batch: str) -> str:
        """Where a batch is stored; of an empty name, where all are. For messages."""

    @property
    def traffic(self) -> Traffic:
        """Requests of this object so far, where they are counted."""
        return Traffic()

    async def close(self) -> None:
        """Lets go of connections that this object opened."""
