"""The trainer's prefetch buffer (DPFlow section 3.4.2, algorithm 3.7), bounded in batches and in bytes.

As printed, the prefetching loop is left when the buffer is full, and nobody enters it again. `LocalBuffer` can be
asked at any time whether there is something to request.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from ephemeron.data.scheduler.prefetch_window import PrefetchWindow
from ephemeron.data.scheduler.sizes import SizeEstimate
from ephemeron.errors import JobError

T = TypeVar("T")


class LocalBuffer(Generic[T]):
    """P_L batches in sampling order.

    Batches are numbered consecutively, over epochs too. Answers may come in any order and more than once; they are
    handed out in order and once. Nothing is asked for that is estimated to pass the limit, unless nothing is held;
    what is held is therefore at most the limit and `in_flight` batches of the largest size.

    Args:
        batches: P_L, batches held or under way.
        limit_nbytes: for both.
        in_flight: requests under way at a time.
        first: number of the first batch.
    """

    def __init__(self, *, batches: int, limit_nbytes: int, in_flight: int = 2, first: int = 0) -> None:
        if min(batches, limit_nbytes, in_flight) <= 0:
            raise JobError(
                f"batches = {batches}, limit_nbytes = {limit_nbytes}, in_flight = {in_flight} let nothing in",
                remedy="give each more than 0",
            )
        self.in_flight = in_flight
        self._window = PrefetchWindow(batches=batches, limit_bytes=limit_nbytes, unmeasured=in_flight)
        self.held_nbytes = 0
        self.taken = first
        """The next batch to hand out: all before it were."""
        self._asked = first
        self._size = SizeEstimate(0)
        self._held: dict[int, tuple[T, int]] = {}

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Batches that were requested and are not here: ask again for these if no answer comes."""
        return tuple(n for n in range(self.taken, self._asked) if n not in self._held)

    @property
    def received(self) -> int:
        """All batches before this one are here or were handed out."""
        return next(iter(self.outstanding), self._asked)

    def request(self) -> int | None:
        """The next batch to ask for, if there is room for it."""
        under_way = len(self.outstanding)
        if under_way >= self.in_flight:
            return None
        if not self._window.has_room(held=len(self._held), under_way=under_way, held_bytes=self.held_nbytes):
            return None
        self._asked += 1
        return self._asked - 1

    def put(self, number: int, batch: T, nbytes: int) -> bool:
        """An answer came. False: it is here already, or was not asked for; drop it."""
        if number in self._held or not self.taken <= number < self._asked:
            return False
        self._size.saw(nbytes)
        self._window.usual_bytes = self._size.nbytes
        self._held[number] = (batch, nbytes)
        self.held_nbytes += nbytes
        return True

    def get(self) -> T | None:
        """The next batch, in order. None: it is not here yet."""
        if self.taken not in self._held:
            return None
        batch, nbytes = self._held.pop(self.taken)
        self.held_nbytes -= nbytes
        self.taken += 1
        return batch
