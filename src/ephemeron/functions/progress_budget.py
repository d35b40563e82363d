"""How many functions may end without progress, whatever they end with: killed, failed, idle, or replaced by another one.

One rule for everything that keeps functions running: an end counts unless something was done since the last one that counted. So the
number of functions that are paid for is bounded by what they achieve, also where nobody knows why they achieve nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ProgressBudget:
    """Ends without progress, in a row."""

    most: int
    """So many are borne."""
    spent: int = 0
    last: str = ""
    """What the last one ended with."""
    _progress: float = 0.0

    def progressed(self, progress: float) -> None:
        """Takes note of what is done so far, a number that grows: the row ends where it has grown."""
        if progress > self._progress:
            self._progress, self.spent, self.last = progress, 0, ""

    def ended(self, how: str) -> bool:
        """Counts a function that has ended without progress; whether there was one too many."""
        self.spent, self.last = self.spent + 1, how
        return self.spent > self.most
