"""Which contributions the versions of one shard hold, in runs whose versions hold what has arrived. Pure.

Version v of a shard folds in, of every rank, the iterations from where version v − 1 ended: a chain, in which each
contribution has one place. A published version says of every rank how many of its iterations were folded in before it,
and with it. Three rules keep the chain unique, whichever ranks die:

- A version is published by a create-only put: of an aggregator and its replacement one makes it, and the other takes
  over what it holds.
- A replacement that finds a gap (a put that was lost) fills it with exactly what the version after the gap does not
  hold: all of it is still there, because no rank has applied the version that was lost.
- A version that does not continue the one before it was made by an attempt that had been superseded. Readers take it
  for absent, and the newer attempt overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Marks(NamedTuple):
    """By rank, numbers of iterations folded in."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Marks:
        """From one sequence, as a message carries them; the inverse of `numbers`."""
        half = len(numbers) // 2
        return cls(tuple(numbers[:half]), tuple(numbers[half:]))

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.before + self.after

    def folded(self, rank: int) -> range:
        """Iterations of a rank that this version holds."""
        return range(self.before[rank], self.after[rank])


@dataclass(slots=True)
class VersionChain:
    """An aggregator's place in its shard's chain.

    Args:
        folded: by rank, iterations folded in so far.
    """

    folded: list[int]
    later: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Versions that a predecessor has published behind a gap, ascending, each with its marks before."""

    def found(self, version: int, before: Sequence[int]) -> None:
        """A version behind the next one exists."""
        self.later = sorted({*self.later, (version, tuple(before))})

    def bound(self, version: int) -> tuple[int, ...] | None:
        """By rank, where a version has to end because a later one exists; None: wherever it likes."""
        return next((before for later, before in self.later if later > version), None)

    def advance(self, rank: int) -> None:
        """The next contribution of a rank was folded in."""
        self.folded[rank] += 1

    def take_over(self, marks: Marks) -> None:
        """This version was published by another attempt of this rank."""
        self.folded = list(marks.after)
