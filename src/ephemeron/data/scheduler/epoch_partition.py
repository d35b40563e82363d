"""Partition of the positions of an epoch among ranks, by arithmetic alone: there is no state that could be lost.

Step t of an epoch is a contiguous run of positions, cut into one batch for each rank. So after all ranks have made
t steps a *prefix* of the epoch is used up, for every world size, and two worlds with the same global batch use
the same positions in the same steps (but for the last two, where the remainder is dealt).

The remainder rule. A full step is world_size × batch positions. The remainder is shorter than one step:

- `keep`: no position is repeated and none is dropped; the remainder is distributed evenly as a smaller last step. If it
  is too small for each rank to get one position, the step before gives up some, so that every rank has the same number
  of batches and none is empty. Empty batches, always explicit, remain where they cannot be avoided: fewer
  positions than ranks in all, or batch = 1.
- `even`: a smaller last step as well, but with equally many positions for each rank: it is filled up with positions
  from the beginning of the epoch, fewer than there are ranks, which are thus delivered twice. No batch is empty, and a
  single rank repeats none.
- `drop`: the remainder is left out.
- `pad`: the step is filled up with positions from the beginning of the epoch, which are thus delivered twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ephemeron.errors import JobError

Remainder: TypeAlias = Literal["keep", "even", "drop", "pad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPartition:
    """`count` positions for `world_size` ranks."""

    count: int
    batch: int
    """Positions in a rank's batch."""
    world_size: int
    remainder: Remainder = "keep"

    def __post_init__(self) -> None:
        for name, least in (("count", 0), ("batch", 1), ("world_size", 1)):
            if getattr(self, name) < least:
                raise JobError(f"{name} = {getattr(self, name)} is too small", remedy=f"give {least} or more")
        if self.remainder not in get_args(Remainder):
            raise JobError(f"remainder = {self.remainder!r} is not known", remedy="give 'even', 'keep', 'drop' or 'pad'")

    @property
    def batches(self) -> int:
        """Batches of every rank."""
        whole, rest = divmod(self.count, self.batch * self.world_size)
        return whole + (rest > 0 and self.remainder != "drop")

    def step(self, sequence: int) -> range:
        """The positions of all ranks in a step: below `count`, or beyond it where they are padding."""
        size = self.batch * self.world_size
        start, end = sequence * size, (sequence + 1) * size
        if self.remainder == "even":
            return range(start, min(end, -(-self.count // self.world_size) * self.world_size))
        if self.remainder != "keep":
            return range(start, end)
        scanty = self.count % size if self.count > size and self.batch > 1 else 0
        if 0 < scanty < self.world_size:  # the last two steps share their positions
            start -= (self.world_size - scanty) * (sequence == self.batches - 1)
            end -= (self.world_size - scanty) * (sequence == self.batches - 2)
        return range(start, min(end, self.count))

    def part(self, rank: int, sequence: int) -> range:
        """The positions of a rank in a step; sizes differ by at most one.

        Raises:
            IndexError: the rank or the batch does not exist.
        """
        if not (0 <= rank < self.world_size and 0 <= sequence < self.batches):
            raise IndexError(f"batch {sequence} of rank {rank} is not among the {self.batches} of {self.world_size} ranks")
        step = self.step(sequence)
        least, more = divmod(len(step), self.world_size)
        start = rank * least + min(rank, more)
        return step[start : start + least + (rank < more)]


def pick(spans: Sequence[range], part: range) -> list[range]:
    """The elements number `part` of the concatenated spans, as spans."""
    found, before = [], 0
    for span in spans:
        found.append(span[max(0, part.start - before) : max(0, part.stop - before)])
        before += len(span)
    return [span for span in found if span]


def merge(spans: Iterable[range]) -> tuple[range, ...]:
    """The same numbers in as few spans as possible, in order; the spans do not overlap."""
    merged: list[range] = []
    for span in sorted((span for span in spans if span), key=lambda span: span.start):
        if merged and merged[-1].stop == span.start:
            span = range(merged.pop().start, span.stop)
        merged.append(span)
    return tuple(merged)
