"""The loader's side of QMOWS: its local queue (DPFlow section 3.4.1, algorithm 3.3).

Printed, the algorithm stands still during each request, which makes a window of K > N pointless, and asks without
pause when there is nothing to do. Here a loader goes on with its queue while a request is under way (with
K >= 2 N it never stands still), and a request of a loader without work is one that the service answers when there
is some. Results that were not acknowledged are at most 2 N: N in the request, N made meanwhile.

A reply holds the *whole* queue that the loader is to have, so a lost, repeated or late one cannot do harm: only the
answer to the request under way counts, and it replaces what was there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ephemeron.data.scheduler.tasks import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """One request: what has become of tasks, and thereby the wish for more."""

    request: int
    """Counted from 1 by each loader; a repeated request keeps its number."""
    done: tuple[Key, ...] = ()
    """Tasks whose results come with the request."""
    failed: Mapping[Key, str] = field(default_factory=dict)
    """Tasks that raised, and what."""
    running: Key | None = None
    """The task that the loader was at when it wrote this."""


class LoaderQueue:
    """Local queue, results not yet reported, and at most one request under way.

    The caller loops: `take` and work; `finish` or `fail`; send what `report` returns; `sync` with the answer.

    Args:
        batch: N, results in a request.
    """

    def __init__(self, *, batch: int) -> None:
        self.batch = batch
        self.running: Key | None = None
        self.under_way: LoaderReport | None = None
        """The request whose answer is awaited; repeat it as it is if none comes."""
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
        """The tasks to be taken next, at most so many."""
        return tuple(islice(self._queue, count))

    def finish(self) -> None:
        """The running task has a result, which the caller keeps until the request that carries it was answered."""
        self._done.append(self.running)
        self.running = None

    def fail(self, reason: str) -> None:
        """The running task raised."""
        self._failed[self.running] = reason
        self.running = None

    def report(self) -> LoaderReport | None:
        """The request to send now, if one is due: after N results, or when there is nothing left to do."""
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
        """Takes over the queue in a reply. False: not the answer to the request under way, and ignored."""
        if self.under_way is None or request != self.under_way.request:
            return False
        self.under_way = None
        known = {*self._done, *self._failed, self.running}
        self._queue = deque(key for key in tasks if key not in known)
        return True

    @property
    def _unreported(self) -> int:
        return len(self._done) + len(self._failed)
