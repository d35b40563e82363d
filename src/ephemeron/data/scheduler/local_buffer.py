"""The trainer's prefetch buffer (DPFlow section 3.4.2, algorithm 3.7), bounded in batches and in bytes.

As printed, the prefetching loop is left when the buffer is full, and not entered again. `LocalBuffer.request` can be called at any
time.
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
    handed out in order and once. A batch that is estimated to exceed the limit is not requested unless the buffer is
    empty; the buffer therefore holds at most the limit and `in_flight` batches of the largest size.

    Args:
        batches: P_L, batches held or under way.
        limit_nbytes: bytes held or expected.
        in_flight: requests under way at a time.
        first: number of the first batch.
    """

    def __init__(self, *, batches: int, limit_nbytes: int, in_flight: int = 2, first: int = 0) -> None:
        if min(batches, limit_nbytes, in_flight) <= 0:
            raise JobError(
                f"batches = {batches}, limit_nbytes = {limit_nbytes}, in_flight = {in_flight} are not all above 0",
                remedy="give each more than 0",
            )
        self.in_flight = in_flight
        self._window = PrefetchWindow(batches=batches, limit_bytes=limit_nbytes, unmeasured=in_flight)
        self.held_nbytes = 0
        self.taken = first
        """Number of the next batch to hand out."""
        self._asked = first
        self._size = SizeEstimate(0)
        self._held: dict[int, tuple[T, int]] = {}

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Batches that were requested and have not arrived: repeat the request if no answer comes."""
        return tuple(n for n in range(self.taken, self._asked) if n not in self._held)

    @property
    def received(self) -> int:
        """Number of the first batch that has not arrived; all before it arrived or were handed out."""
        return next(iter(self.outstanding), self._asked)

    def request(self) -> int | None:
        """Number of the next batch to request, if there is room for it."""
        under_way = len(self.outstanding)
        if under_way >= self.in_flight:
            return None
        if not self._window.has_room(held=len(self._held), under_way=under_way, held_bytes=self.held_nbytes):
            return None
        self._asked += 1
        return self._asked - 1

    def put(self, number: int, batch: T, nbytes: int) -> bool:
        """An answer arrived. False: it is a duplicate or was not requested, and is dropped."""
        if number in self._held or not self.taken <= number < self._asked:
            return False
        self._size.saw(nbytes)
        self._window.usual_bytes = self._size.nbytes
        self._held[number] = (batch, nbytes)
        self.held_nbytes += nbytes
        return True

    def get(self) -> T | None:
        """The next batch, in order. None: it has not arrived."""
        if self.taken not in self._held:
            return None
        batch, nbytes = self._held.pop(self.taken)
        self.held_nbytes -= nbytes
        self.taken += 1
        return batch
