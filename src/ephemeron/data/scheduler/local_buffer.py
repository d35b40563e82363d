"""The trainer's prefetch buffer (DPFlow section 3.4.2, algorithm 3.7), bounded in batches and in bytes.

As printed, the prefetching loop is left when the buffer is full, and not entered again. `LocalBuffer.request` can be called at any
time.

Bound on batches loaded ahead, in number and in bytes at the usual size of a batch. Pure.

Sizes are unknown until a batch is complete, so a load reserves the usual size. The bytes held are at most the limit
plus the excess of the batches under way over the usual size; the next batch is always loaded.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

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


# -- estimate of the size of the next object from the last ones ---------------------------------------------------


SEEN = 32
"""Number of sizes remembered, hence of objects after which the estimate has followed a real change."""
CLIP = 4
"""A size counts at most this many times the median."""


class SizeEstimate:
    """Mean of the last 32 sizes, each clipped to four times their median.

    One sample 1,000 times as large as the rest thus raises the estimate by a tenth; an unclipped mean would go up
    thirtyfold and stop all prefetching meanwhile.

    Args:
        guess_nbytes: estimate before any size was seen.
    """

    def __init__(self, guess_nbytes: int) -> None:
        self.nbytes = guess_nbytes
        """Bytes to reserve."""
        self._seen: deque[int] = deque(maxlen=SEEN)

    def saw(self, nbytes: int) -> None:
        """Records the size of an object."""
        self._seen.append(nbytes)
        ordered = sorted(self._seen)
        highest = CLIP * ordered[(len(ordered) - 1) // 2]
        self.nbytes = math.ceil(sum(min(size, highest) for size in ordered) / len(ordered))


# -- bound on batches loaded ahead --------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class PrefetchWindow:
    """Limits of the batches that are loaded ahead."""

    batches: int
    """Batches held or under way, at most."""
    limit_bytes: float
    """Bytes held, and expected of batches under way, at most."""
    unmeasured: int = 2
    """Batches under way, at most, while no size is known."""
    usual_bytes: int | None = None
    """Size of a batch; None: no batch has been complete yet."""

    def has_room(self, *, held: int, under_way: int, held_bytes: int) -> bool:
        """True if another batch may be requested.

        Args:
            held: complete batches.
            under_way: requested batches that are not complete.
            held_bytes: bytes that have arrived.
        """
        if held + under_way == 0:
            return True
        if held + under_way >= self.batches:
            return False
        if self.usual_bytes is None:
            return held + under_way < self.unmeasured
        return held_bytes + self.usual_bytes * (under_way + 1) <= self.limit_bytes
