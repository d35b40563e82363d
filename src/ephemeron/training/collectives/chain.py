"""The chain of one shard's versions in ASP runs, whose versions hold the contributions that have arrived. Pure.

Version v of a shard holds, for every rank, the iterations from where version v − 1 ended: a chain, in which each
contribution has one place. A published version states, for every rank, how many of its iterations were folded in before it,
and with it. Three rules keep the chain unique, whichever functions die:

- A version is published by a create-only put: either an aggregator or its replacement makes it, and the other one
  continues after it.
- A replacement that finds a gap (a put that was lost) fills it with exactly the contributions that the version after the
  gap does not hold: all of them are still stored, because no rank has applied the version that was lost.
- A version that does not continue the one before it was made by an attempt that had been superseded. Readers ignore
  it, and the newer attempt overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Marks(NamedTuple):
    """Numbers of iterations folded in, by rank."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Marks:
        """Marks from one sequence, as in a message; the inverse of `numbers`."""
        half = len(numbers) // 2
        return cls(tuple(numbers[:half]), tuple(numbers[half:]))

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.before + self.after

    @property
    def contributions(self) -> int:
        """Contributions in this version."""
        return sum(self.after) - sum(self.before)

    def folded(self, rank: int) -> range:
        """Iterations of a rank in this version."""
        return range(self.before[rank], self.after[rank])


@dataclass(slots=True)
class VersionChain:
    """An aggregator's position in the chain of its shard.

    Args:
        folded: by rank, iterations folded in so far.
    """

    folded: list[int]
    later: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Versions that a predecessor has published behind a gap, ascending, each with its marks before."""

    def found(self, version: int, before: Sequence[int]) -> None:
        """Takes in that a version behind the next one exists."""
        self.later = sorted({*self.later, (version, tuple(before))})

    def bound(self, version: int) -> tuple[int, ...] | None:
        """By rank, where a version has to end because a later one exists; None: it may end anywhere."""
        return next((before for later, before in self.later if later > version), None)

    def advance(self, rank: int) -> None:
        """Takes in that the next contribution of a rank was folded in."""
        self.folded[rank] += 1

    def take_over(self, marks: Marks) -> None:
        """Continues after a version that another attempt of this rank has published."""
        self.folded = list(marks.after)
