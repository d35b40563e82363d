"""Failure detector of all patterns: decides whether a late peer has failed. Pure: clock and observations are arguments.

The collective finds the late peer (a contribution or a shard is missing, a parameter server has no push of a rank); between
stages the wait-for graph does (`wait_for_graph`). A late peer counts as failed

- not before it has been silent for longer than its timeout (`timeouts`);
- not while it makes progress, in runs whose ranks do not wait for each other;
- not while its latest attempt may still be starting or repeating iterations. The time for that doubles with each replacement
  that did not help. Claims carry the number of such replacements, so that every rank knows it.

`replacement` observes peers and replaces those that have failed.
"""

from __future__ import annotations

from ephemeron.training.worker.recovery.fencing import Claim
from ephemeron.training.worker.timeouts import Timeouts


class FailureDetector:
    """One rank's view of its peers.

    Times are seconds: `now_s` of the loop's clock, `run_s` since the launch of the run.

    Args:
        timeouts: iteration times and progress of peers.
        lifetime_s: function timeout.
        cold_start_s: expected time of a cold start.
        checkpoint_every: iterations between two checkpoints.
    """

    def __init__(self, timeouts: Timeouts, *, lifetime_s: float, cold_start_s: float, checkpoint_every: int) -> None:
        self._timeouts = timeouts
        self._lifetime_s, self._cold_start_s, self._checkpoint_every = lifetime_s, cold_start_s, checkpoint_every
        self.progress_seen: dict[int, int] = {}
        """By rank: latest iteration at the last observation. A successor gets it, and so needs one timed-out wait instead of
        two to see that a peer makes no progress; an invocation may be too short for two."""
        self._observed: dict[int, tuple[float, bool]] = {}
        """By rank: time of the last observation, and whether the rank had made progress."""
        self._ahead: dict[tuple[int, int], float] = {}
        """By rank and attempt: when a claim with a time in the future was first read."""

    def recent_observation(self, rank: int, now_s: float) -> bool | None:
        """Whether the last observation of a rank found progress; None: it is too old, and the rank has to be observed."""
        observed = self._observed.get(rank)
        if observed is None or now_s - observed[0] >= 0.5 * self._timeout_s():
            return None
        return observed[1]

    def observe(self, rank: int, latest: int, now_s: float) -> bool:
        """Takes in the latest iteration of a rank, and returns whether it has made progress.

        Progress since the last observation, of a predecessor if need be, or since the start of the run at the first one.
        """
        iterations, self.progress_seen[rank] = latest - self.progress_seen.get(rank, -1), latest
        if iterations > 0:
            self._timeouts.record_progress(rank, now_s, iterations=iterations)
        self._observed[rank] = (now_s, iterations > 0)
        return iterations > 0

    def is_silent(self, rank: int, iteration: int, now_s: float) -> bool:
        """Whether a rank has been silent, or this invocation and its predecessors have waited for it, for its timeout."""
        silence_s = self._timeouts.silence_s(rank, now_s)
        if silence_s is None:
            return True
        if (rank, iteration) in self._timeouts.waited_before_s:
            silence_s = max(silence_s, self._timeouts.waited_s(rank, iteration, now_s))
        return silence_s >= 0.9 * self._timeouts.peer_timeout_s(rank, limit_s=self._limit_s())

    def is_starting(self, rank: int, attempt: int, claim: Claim, iteration: int, *, now_s: float, run_s: float) -> bool:
        """Whether the latest attempt of a rank may still be starting, or repeating iterations up to `iteration`."""
        age_s = run_s - claim.at_s
        if age_s < 0:  # the claimant's clock is ahead of this one: the age counts from the first reading
            age_s = now_s - self._ahead.setdefault((rank, attempt), now_s)
        return age_s < self._grace_s(rank, claim, iteration)

    def _timeout_s(self) -> float:
        """Timeout, independent of the time that this invocation has left."""
        return min(self._timeouts.timeout_s(), self._limit_s())

    def _limit_s(self) -> float:
        return self._timeouts.limit_s(lifetime_s=self._lifetime_s, cold_start_s=self._cold_start_s)

    def _grace_s(self, rank: int, claim: Claim, iteration: int) -> float:
        """Seconds that an attempt may take to start and to repeat iterations from its checkpoint, at most the function timeout.

        Without this time, workers whose function timeout is hardly longer would replace each other without end.
        """
        timeout_s = self._timeout_s()
        own_s = self._timeouts.typical_s or self._timeouts.slowest_s or timeout_s
        each_s = max(own_s, self._timeouts.iteration_s(rank))
        back = 0 if claim.not_after is None else max(0, iteration - claim.not_after)
        repeated = (2 * self._checkpoint_every + back) * each_s
        catching_up = min(self._lifetime_s, self._cold_start_s + repeated)
        return float(max(0.9 * timeout_s * 2**claim.tries, catching_up))
