"""Time and cost left to one invocation. Pure: clock and traffic are arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

from ephemeron.events import Traffic
from ephemeron.prices import Prices


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
    """Ranks that share the run's budget."""
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

    others_usd: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By rank, its cost as its latest message says, and the time of that message."""

    def record(self, rank: int, spent_usd: float, now_s: float) -> None:
        """Takes in what another rank has said that it has cost. Never less than before: an older message may be late."""
        if spent_usd > self.others_usd.get(rank, (0.0, 0.0))[0]:
            self.others_usd[rank] = spent_usd, now_s

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
        """Cost of the run so far, with functions that were started ahead.

        Ranks do not cost the same: those that aggregate read far more. Others count with what they have said, and the time since
        then; those that have said nothing to this one like the mean of those that have, or like this one.
        """
        ahead_usd = self.prices.functions_usd(self.ahead_gb * (now_s - self.ahead_since_s), 0) if self.ahead_gb else 0.0
        own_usd, gb = self.spent_usd(now_s, traffic), self.memory_mb / 1024
        said = [usd + self.prices.functions_usd(gb * (now_s - at), 0) for usd, at in self.others_usd.values()]
        silent_usd = sum(said) / len(said) if said else own_usd
        return own_usd + sum(said) + silent_usd * (self.workers - 1 - len(said)) + ahead_usd

    def is_spent_by(self, now_s: float, traffic: Traffic, *, gb_seconds: float) -> bool:
        """Whether the run's budget is used up after further GB-seconds of all its functions."""
        usd = self.run_usd(now_s, traffic) + self.prices.functions_usd(gb_seconds, 0)
        return self.limit_usd is not None and usd >= self.limit_usd

    def is_exceeded(self, now_s: float, traffic: Traffic, *, stopping_s: float = 0.0, ahead_stopping_s: float = 0.0) -> bool:
        """Whether the run has to stop to keep its budget.

        Args:
            now_s, traffic: see `spent_usd`.
            stopping_s: duration of a stop at a checkpoint.
            ahead_stopping_s: seconds until functions that were started ahead have ended after a stop.
        """
        gb_seconds = self.memory_mb / 1024 * self.workers * stopping_s + self.ahead_gb * ahead_stopping_s
        return self.is_spent_by(now_s, traffic, gb_seconds=gb_seconds)
