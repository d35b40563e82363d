"""The loader's side of QMOWS: its local queue (DPFlow section 3.4.1, algorithm 3.3).

As printed, the algorithm pauses during each request, which makes a window of K > N useless, and repeats requests without pause when
there is no work. Here a loader continues with its queue while a request is under way (with K >= 2 N it never pauses), and the service
answers a request of a loader without work when there is some. Results that were not acknowledged are at most 2 N: N in the request,
N made meanwhile.

A reply holds the *whole* queue of the loader, so a lost, repeated or late reply is harmless: only the answer to the
request under way counts, and it replaces the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic

from ephemeron.data.scheduler.tasks import K


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
