"""Budget of probes that are paid: largest cost of a set of probes before the first, and the bill as they end. Pure.

Each call has a time limit, so its largest cost is known before it is made. A call is made only if that fits what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron.errors import JobError
from ephemeron.functions.base import Outcome
from ephemeron.prices import Prices

BUDGET_USD = 0.5
"""Of the probes of one job, unless another one is given."""
PER_SIZE = 2
"""Calls of each size: steps, and transfers."""


class BudgetSpent(Exception):
    """A call could cost more than is left of the budget. It was not made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCosts:
    """What the probes of a job can cost at most."""

    sizes_mb: tuple[int, ...]
    first_mb: int
    """Size of the first look, a call more."""
    call_s: float
    """Time limit of a call."""
    requests_usd: float
    """Requests to the channel of all calls."""
    prices: Prices

    @property
    def calls(self) -> int:
        return 1 + PER_SIZE * len(self.sizes_mb)

    def call_usd(self, memory_mb: int) -> float:
        """One call that lasts until its time limit."""
        return self.prices.functions_usd(memory_mb / 1024 * self.call_s, 1)

    @property
    def most_usd(self) -> float:
        """All calls, each until its time limit."""
        calls = self.call_usd(self.first_mb) + PER_SIZE * sum(map(self.call_usd, self.sizes_mb))
        return calls + self.requests_usd

    def text(self, budget_usd: float) -> str:
        """The probes and their cost for people."""
        sizes = ", ".join(f"{size:,}" for size in self.sizes_mb)
        return (
            f"{self.calls} calls of functions of {sizes} MB, of up to {self.call_s:g} s each: at most ${self.most_usd:.4f} of a "
            f"budget of ${budget_usd:g} ({self.prices.name}, {self.prices.as_of}); further calls only while the rest covers them"
        )

    def check(self, budget_usd: float) -> None:
        """Refuses a budget that the calls of all sizes may exceed.

        Raises:
            JobError: it is too small.
        """
        if self.most_usd > budget_usd:
            raise JobError(
                f"{self.calls} calls of up to {self.call_s:g} s may cost ${self.most_usd:.4f}, the budget is ${budget_usd:g}",
                remedy=f"give --budget-usd {self.most_usd * 1.01:.2g}, or fewer sizes with --memory-mb",
            )


class ProbeBill:
    """The bill of probes, against a budget.

    Args:
        costs: of the probes.
        budget_usd: for all of them, requests to the channel included.
    """

    def __init__(self, costs: ProbeCosts, budget_usd: float) -> None:
        self.spent_usd = self.requests_usd = costs.requests_usd
        self.gb_seconds = 0.0
        self.calls = 0
        """That have ended."""
        self._costs, self.budget_usd = costs, budget_usd

    def admit(self, memory_mb: int) -> None:
        """Raises `BudgetSpent` unless what is left covers a call of this size until its time limit."""
        if self.spent_usd + self._costs.call_usd(memory_mb) > self.budget_usd:
            raise BudgetSpent(f"${self.budget_usd:g} do not cover another call of {memory_mb} MB")

    def add(self, outcome: Outcome) -> None:
        """Counts a call that has ended."""
        self.calls += 1
        self.gb_seconds += outcome.gb_seconds
        self.spent_usd += self._costs.prices.functions_usd(outcome.gb_seconds, 1)


def vcpus_of(seconds: Sequence[tuple[float, float]], *, worth: float) -> float:
    """Share of the CPU above which more brings nothing, from steps of one batch.

    Args:
        seconds: (vCPUs, seconds of the step) of each size, any order.
        worth: speedup, against the largest size of one vCPU or less, that counts.

    Returns:
        At least 1.
    """
    ordered = sorted(seconds)
    reference = max((row for row in ordered if row[0] <= 1.0), default=ordered[0])
    larger = [row for row in ordered if row[0] > max(1.0, reference[0])]
    if not larger:
        return 1.0
    share, quickest = min(larger, key=lambda row: row[1])
    used = reference[0] * reference[1] / quickest
    return 1.0 if used < worth else min(share, used)
