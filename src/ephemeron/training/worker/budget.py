"""Time and cost left to one invocation. Pure: clock and traffic are arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

from ephemeron.events import Traffic
from ephemeron.training.planner.prices import Prices


@dataclass(slots=True, kw_only=True)
class Budget:
    """Time limit of one invocation, and the cost meter of its rank.

    Times are loop times in seconds.
    """

    began_s: float
    """Time from which this invocation, or its generation, is billed: with its cold start, where platforms bill that."""
    deadline_s: float
    """Time at which the platform ends the invocation."""
    memory_mb: int
    workers: int
    """Ranks that share the run's budget equally."""
    prices: Prices
    limit_usd: float | None
    """Budget of the whole run; None: unlimited."""
    spent_before_usd: float = 0.0
    """Cost of the rank's earlier invocations, as its checkpoint says; or its share of earlier generations' cost."""
    traffic_before: Traffic = field(default_factory=Traffic)
    """Channel operations of this invocation that are in it."""
    ahead_gb: float = 0.0
    """Memory of all functions that were started for the next generation."""
    ahead_since_s: float = 0.0
    """Time at which they were started."""

    def start_ahead(self, now_s: float, *, workers: int, memory_mb: int) -> None:
        """Counts functions that are started for the next generation, by all ranks together, from now on."""
        self.ahead_gb, self.ahead_since_s = workers * memory_mb / 1024, now_s

    def time_left_s(self, now_s: float) -> float:
        """Seconds until the platform ends this invocation."""
        return self.deadline_s - now_s

    def spent_usd(self, now_s: float, traffic: Traffic) -> float:
        """Cost of this rank so far, earlier invocations included.

        Args:
            now_s: loop time.
            traffic: channel operations of this invocation.
        """
        gb_seconds = self.memory_mb / 1024 * (now_s - self.began_s)
        return self.spent_before_usd + self.prices.functions_usd(gb_seconds, 1) + self._storage_usd(traffic)

    def _storage_usd(self, traffic: Traffic) -> float:
        return float(self.prices.storage_usd(traffic) - self.prices.storage_usd(self.traffic_before))

    def run_usd(self, now_s: float, traffic: Traffic) -> float:
        """Cost of the run so far, as if all ranks were like this one, with functions that were started ahead."""
        ahead_usd = self.prices.functions_usd(self.ahead_gb * (now_s - self.ahead_since_s), 0) if self.ahead_gb else 0.0
        return self.spent_usd(now_s, traffic) * self.workers + ahead_usd

    def is_spent_by(self, now_s: float, traffic: Traffic, *, gb_seconds: float) -> bool:
        """Whether the run's budget is used up after further GB-seconds of all its functions."""
        usd = self.run_usd(now_s, traffic) + self.prices.functions_usd(gb_seconds, 0)
        return self.limit_usd is not None and usd >= self.limit_usd

    def is_exceeded(
        self, now_s: float, traffic: Traffic, *, stopping_s: float = 0.0, ahead_stopping_s: float = 0.0
    ) -> bool:
        """Whether the run has to stop to keep its budget.

        Args:
            now_s, traffic: see `spent_usd`.
            stopping_s: duration of a stop at a checkpoint.
            ahead_stopping_s: seconds until functions that were started ahead have ended after a stop.
        """
        gb_seconds = self.memory_mb / 1024 * self.workers * stopping_s + self.ahead_gb * ahead_stopping_s
        return self.is_spent_by(now_s, traffic, gb_seconds=gb_seconds)
