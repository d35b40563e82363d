"""Names of a queue's objects. Everything of queue Q begins with `Q.`, and the first part of a key keeps listings short.

Q.work/BATCH                    its tasks, create-only; absent once all have results
Q.work/BATCH.lATTEMPT           create-only: the lease of this attempt
Q.work/BATCH.hATTEMPT.NUMBER    sign of life of the lease's owner: the number has grown
Q.work/BATCH.xATTEMPT           an observer has seen this lease expire: so executors that live for less than `lease_s` may take it
Q.work/closed                   no task will be published any more
Q.log/BATCH.NUMBER              create-only: results of some tasks of the batch, none of which is in an earlier number
Q.edge/EDGE                     its tasks, and how many inputs they wait for
Q.lost/EDGE                     create-only: one of its inputs is dead or cancelled
Q.mXX/COUNTER/MEMBER.AMOUNT     members of a counter; XX spreads counters over 256 prefixes
Q.data/TASK.OWNER               a result that is too large for the log
Q.live/EXECUTOR.NUMBER          sign of life of an executor: the number has grown
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListedBatch:
    """What a listing tells of a batch."""

    attempt: int = 0
    """Highest lease; 0: none."""
    beat: int = 0
    """Highest sign of life of that lease."""
    expired: int = 0
    """Highest lease that an observer has seen expire."""


_FREE, _NO_LEASE = ListedBatch(), (0, 0)


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """Keys of one queue."""

    queue: str

    @property
    def work(self) -> str:
        return f"{self.queue}.work/"

    @property
    def closed(self) -> str:
        return f"{self.queue}.work/closed"

    @property
    def logs(self) -> str:
        return f"{self.queue}.log/"

    @property
    def live(self) -> str:
        return f"{self.queue}.live/"

    def batch(self, batch: str) -> str:
        return f"{self.queue}.work/{batch}"

    def lease(self, batch: str, attempt: int) -> str:
        return f"{self.queue}.work/{batch}.l{attempt}"

    def beat(self, batch: str, attempt: int, number: int) -> str:
        return f"{self.queue}.work/{batch}.h{attempt}.{number}"

    def expired(self, batch: str, attempt: int) -> str:
        return f"{self.queue}.work/{batch}.x{attempt}"

    def log(self, batch: str, number: int) -> str:
        return f"{self.queue}.log/{batch}.{number:06d}"

    def edge(self, edge: str) -> str:
        return f"{self.queue}.edge/{edge}"

    def lost(self, edge: str) -> str:
        return f"{self.queue}.lost/{edge}"

    def counter(self, counter: str) -> str:
        spread = hashlib.blake2b(counter.encode(), digest_size=1).hexdigest()
        return f"{self.queue}.m{spread}/{counter}/"

    @property
    def data(self) -> str:
        return f"{self.queue}.data/"

    def alive(self, executor: str, number: int) -> str:
        return f"{self.queue}.live/{executor}.{number}"

    def listed(self, keys: Iterable[str]) -> tuple[dict[str, ListedBatch], bool]:
        """Batches in a listing of `work` that are not complete, and whether the queue is closed."""
        there: list[str] = []
        leases: dict[str, tuple[int, int]] = {}
        expired: dict[str, int] = {}
        closed, at = False, len(self.work)
        for key in keys:  # executors do little else while they wait
            batch, dot, rest = key[at:].partition(".")
            if not dot:
                there.append(batch)
                continue
            kind, numbers = rest[0], rest[1:].split(".")
            attempt = int(numbers[0])
            if kind == "x":
                expired[batch] = max(expired.get(batch, 0), attempt)
                continue
            sign = (attempt, int(numbers[1]) if kind == "h" else 0)
            if batch not in leases or leases[batch] < sign:
                leases[batch] = sign
        if "closed" in there:
            closed = True
            there.remove("closed")
        batches = {}
        for batch in there:
            sign = leases.get(batch, _NO_LEASE)
            batches[batch] = ListedBatch(sign[0], sign[1], expired.get(batch, 0)) if sign is not _NO_LEASE else _FREE
        return batches, closed


def tasks_of(batch: str) -> int:
    """Number of tasks of a batch, which its name says."""
    return int(batch.rpartition("-")[2])
