"""The loader's side of QMOWS: its local queue (DPFlow section 3.4.1, algorithm 3.3).

In the printed algorithm the loader is idle during each request, which makes a window of K > N pointless, and sends
requests without pause when there is no work. Here a loader continues with its queue while a request is under way (with
K >= 2 N it is never idle), and the service answers the request of a loader without work when there is some.
Results that were not acknowledged are at most 2 N: N in the request, N made meanwhile.

A reply holds the *whole* queue of the loader, so a lost, repeated or late reply is harmless: only the answer to the
request under way counts, and it replaces the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ephemeron.data.scheduler.tasks import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """One request: the outcome of tasks, and implicitly a request for more."""

    request: int
    """Counted from 1 by each loader; a repeated request keeps its number."""
    done: tuple[Key, ...] = ()
    """Tasks whose results come with the request."""
    failed: Mapping[Key, str] = field(default_factory=dict)
    """Reason of each task that raised."""
    running: Key | None = None
    """The task that the loader was working on when it wrote this."""


class LoaderQueue:
    """Local queue, results not yet reported, and at most one request under way.

    Loop of the caller: `take` and work; `finish` or `fail`; send the result of `report`; `sync` with the answer.

    Args:
        batch: N, results in a request.
    """

    def __init__(self, *, batch: int) -> None:
        self.batch = batch
        self.running: Key | None = None
        self.under_way: LoaderReport | None = None
        """The request whose answer is awaited; repeat it unchanged if no answer comes."""
        self._queue: deque[Key] = deque()
        self._done: list[Key] = []
        self._failed: dict[Key, str] = {}
        self._requests = 0

    def take(self) -> Key | None:
        """The next task to work on. None: wait for `sync`."""
        if self.running is None and self._queue and self._unreported < self.batch:
            self.running = self._queue.popleft()
            return self.running
        return None

    def coming(self, count: int) -> tuple[Key, ...]:
        """The next tasks to be taken, at most `count`."""
        return tuple(islice(self._queue, count))

    def finish(self) -> None:
        """The running task has a result, which the caller keeps until the request that carries it is answered."""
        self._done.append(self.running)
        self.running = None

    def fail(self, reason: str) -> None:
        """The running task raised."""
        self._failed[self.running] = reason
        self.running = None

    def report(self) -> LoaderReport | None:
        """The request to send now, if one is due: after N results, or when the queue is empty."""
        idle = self.running is None and not self._queue
        if self.under_way is not None or not (idle or self._unreported >= self.batch):
            return None
        self._requests += 1
        self.under_way = LoaderReport(
            request=self._requests, done=tuple(self._done), failed=self._failed, running=self.running
        )
        self._done, self._failed = [], {}
        return self.under_way

    def sync(self, request: int, tasks: Sequence[Key]) -> bool:
        """Replaces the queue by that of a reply. False: ignored, as it does not answer the request under way."""
        if self.under_way is None or request != self.under_way.request:
            return False
        self.under_way = None
        known = {*self._done, *self._failed, self.running}
        self._queue = deque(key for key in tasks if key not in known)
        return True

    @property
    def _unreported(self) -> int:
        return len(self._done) + len(self._failed)
