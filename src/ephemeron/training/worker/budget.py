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

    def is_exceeded(self, now_s: float, traffic: Traffic) -> bool:
        """Whether this rank has used up its share of the run's budget."""
        return self.limit_usd is not None and self.spent_usd(now_s, traffic) * self.workers >= self.limit_usd
