"""When a region sends and applies which rounds of which fragments: arithmetic on iterations, so that every rank and replacement agrees.

Regions have rounds 1 to `rounds`, with H iterations between two of a fragment, and a last one of all fragments at the end of the run. The
fragments are offset by H / F. What was sent before iteration t is applied before iteration t + delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Due(NamedTuple):
    """A round of a fragment."""

    fragment: int
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSchedule:
    """Rounds of one region.

    `every` and `iterations` may differ among regions, all else is alike.
    """

    iterations: int
    """Of the region's run."""
    every: int
    """H."""
    rounds: int
    """Rounds of each fragment before the last one, all before `iterations`."""
    fragments: int = 1
    delay: int = 0
    """Iterations between sending and applying, below H."""

    @property
    def last(self) -> int:
        """Number of the round at the end of the run."""
        return self.rounds + 1

    def sent_before(self, due: Due) -> int:
        """Iteration before which a round is sent; 0: round 0, the beginning."""
        if due.round > self.rounds:
            return self.iterations
        offset = (self.fragments - 1 - due.fragment) * self.every // self.fragments
        return max(0, due.round * self.every - offset)

    def applied_before(self, due: Due) -> int:
        """Iteration before which a round is applied."""
        return min(self.sent_before(due) + self.delay, self.iterations)

    def late(self, due: Due) -> float:
        """Part of H that passes between sending a round and applying it."""
        return self.delay / self.every

    def sends(self, iteration: int) -> list[Due]:
        """Rounds that are sent before an iteration."""
        if iteration == self.iterations:
            return [Due(fragment, self.last) for fragment in range(self.fragments)]
        return [due for due in self._near(iteration) if self.sent_before(due) == iteration]

    def applies(self, iteration: int) -> list[Due]:
        """Rounds that are applied before an iteration, in the order in which they were sent."""
        if iteration < self.iterations:
            return [due for due in self._near(iteration - self.delay) if self.applied_before(due) == iteration]
        waiting = [due for back in range(self.delay + 1) for due in self._near(iteration - back) if self.applied_before(due) == iteration]
        ordered = sorted(set(waiting), key=lambda due: (self.sent_before(due), due.fragment))
        return [*ordered, *(Due(fragment, self.last) for fragment in range(self.fragments))]

    def is_due(self, iteration: int) -> bool:
        """Whether there is anything to do before an iteration."""
        return iteration == self.iterations or (iteration > 0 and bool(self.sends(iteration) or self.applies(iteration)))

    def decides(self, iteration: int) -> bool:
        """Whether rounds are applied before an iteration: else nothing is decided, and only rank 0 has anything to do."""
        return iteration == self.iterations or (iteration > 0 and bool(self.applies(iteration)))

    def part(self, fragment: int, elements: int) -> slice:
        """Elements of a fragment: contiguous, as equal as can be."""
        return contiguous(fragment, self.fragments, elements)

    def _near(self, iteration: int) -> list[Due]:
        """Rounds that may be sent before an iteration, the last ones left out."""
        found = iteration // self.every
        return [Due(fragment, number) for number in (found, found + 1) if 1 <= number <= self.rounds for fragment in range(self.fragments)]


def contiguous(fragment: int, fragments: int, elements: int) -> slice:
    """Elements of one of several fragments: contiguous, as equal as can be."""
    return slice(fragment * elements // fragments, (fragment + 1) * elements // fragments)
