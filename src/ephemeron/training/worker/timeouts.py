"""Timeouts of waits for peers, learned from iteration times. Pure.

One rule for all patterns: a peer is suspected when it has been silent for ten times the slowest known iteration, and never
before the run's shortest timeout. An iteration counts without the time that the rank waited for others: a dead peer, for which
all ranks wait, must not lengthen the timeout for the next one. Every message carries the slowest iteration that its sender
knows. An invocation passes its knowledge on to its successor and to the replacements that it starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ephemeron.training.collectives.pace import SLOWER, PeerPace

SMOOTH = 0.7
"""Weight of the previous value in the average of iteration times."""
FADING = 0.9
"""Factor by which the slowest iteration time decays per iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """Iteration times that one invocation knows."""

    slowest_s: float = 0.0
    """Slowest recent iteration of any rank, without waits."""
    typical_s: float = 0.0
    """Typical iteration of the rank itself, with waits; 0: not known."""
    evaluation_s: float = 0.0
    """Evaluation of the rank itself; 0: not known."""


@dataclass(slots=True, kw_only=True)
class Timeouts:
    """Iteration times, and when peers made progress, as far as one invocation knows. All times are loop times."""

    least_s: float
    """Shortest timeout."""
    slowest_s: float = 0.0
    """Slowest recent iteration of any rank, without waits."""
    typical_s: float = 0.0
    """Typical iteration of this rank, with waits and without evaluations; 0: not known."""
    evaluation_s: float = 0.0
    """Evaluation of this rank; 0: none has ended."""
    peers: dict[int, PeerPace] = field(default_factory=dict)
    waited_before_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By rank and iteration: seconds that predecessors had waited for it when they ended."""
    _began_s: float | None = None
    _listening_s: float | None = None
    """Start of the time in which messages of peers can arrive."""
    _disturbed: bool = False

    def begin(self, now_s: float) -> None:
        """Starts an iteration."""
        self._began_s, self._disturbed = now_s, False
        self.listen(now_s)

    def listen(self, now_s: float) -> None:
        """Starts the time in which messages of peers can arrive; later calls change nothing."""
        self._listening_s = now_s if self._listening_s is None else self._listening_s

    def mark_disturbed(self) -> None:
        """Leaves this iteration out of the average: a peer was late."""
        self._disturbed = True

    def end(self, now_s: float, *, busy_s: float, evaluated_s: float = 0.0) -> None:
        """Ends the iteration; without effect when none has begun.

        Args:
            now_s: loop time.
            busy_s: duration of the iteration without waits.
            evaluated_s: seconds since its beginning that were an evaluation's.
        """
        if self._began_s is not None:
            took = max(0.0, now_s - self._began_s - evaluated_s)
            self.slowest_s = max(FADING * self.slowest_s, busy_s)
            if not self._disturbed:
                self.typical_s = SMOOTH * (self.typical_s or took) + (1 - SMOOTH) * took
            self._began_s = None

    def record_compute(self, seconds: float) -> None:
        """Records the computing time of an iteration that has not ended: peers may need as long."""
        self.slowest_s = max(self.slowest_s, seconds)

    def record_evaluation(self, seconds: float) -> None:
        """Records the duration of an evaluation."""
        self.evaluation_s = max(FADING * self.evaluation_s, seconds)

    def record_message(self, rank: int, now_s: float, busy_s: float) -> None:
        """Records a new message of a peer, with the slowest iteration that the peer knows."""
        self.slowest_s = max(self.slowest_s, busy_s)
        pace = self._pace(rank, now_s)
        pace.reports = True
        pace.record(now_s)

    def record_progress(self, rank: int, now_s: float, *, iterations: int) -> None:
        """Records that a peer, which may send nothing to this rank, has finished `iterations` since it was last observed.

        Waits of predecessors for that peer no longer count.
        """
        pace = self._pace(rank, now_s)
        if not pace.reports:
            pace.iteration_s = max(pace.iteration_s, (now_s - pace.since_s) / iterations)
        pace.record(now_s)
        self.waited_before_s = {wait: s for wait, s in self.waited_before_s.items() if wait[0] != rank}

    def mark_delivered(self, iteration: int) -> None:
        """Drops waits of predecessors for an iteration that all ranks have delivered, and for earlier ones."""
        self.waited_before_s = {wait: s for wait, s in self.waited_before_s.items() if wait[1] > iteration}

    def _pace(self, rank: int, now_s: float) -> PeerPace:
        if rank not in self.peers:
            self.peers[rank] = PeerPace(now_s if self._listening_s is None else self._listening_s)
        return self.peers[rank]

    def timeout_s(self) -> float:
        """Silence in seconds after which a peer is suspected, as far as its own pace is not known."""
        return max(self.least_s, SLOWER * self.slowest_s)

    def peer_timeout_s(self, rank: int, *, limit_s: float) -> float:
        """Silence in seconds after which one peer is suspected, given its own pace.

        Args:
            rank: of the peer.
            limit_s: see the method of that name.
        """
        iteration_s = self.iteration_s(rank)
        return min(max(self.timeout_s(), SLOWER * iteration_s), max(limit_s, 2 * iteration_s))

    def iteration_s(self, rank: int) -> float:
        """Slowest observed iteration of a peer that reports no iteration times; 0: not known."""
        return self.peers[rank].iteration_s if rank in self.peers else 0.0

    def silence_s(self, rank: int, now_s: float) -> float | None:
        """Seconds since a peer made progress; None: none was observed."""
        pace = self.peers.get(rank)
        return None if pace is None else now_s - pace.since_s

    def waited_s(self, rank: int, iteration: int, now_s: float) -> float:
        """Seconds that this invocation and its predecessors have waited for a rank since it last made progress.

        This invocation's wait counts from the start of its current iteration.
        """
        since_s = self._listening_s if self._began_s is None else self._began_s
        silence_s = self.silence_s(rank, now_s)
        waited_s = 0.0 if since_s is None else now_s - since_s
        return self.waited_before_s.get((rank, iteration), 0.0) + (waited_s if silence_s is None else min(waited_s, silence_s))

    def limit_s(self, *, lifetime_s: float, cold_start_s: float) -> float:
        """Longest timeout of functions with this function timeout: with a longer one they would never suspect a peer."""
        return max(0.2 * lifetime_s, 2 * self.slowest_s + cold_start_s)

    def state(self) -> IterationTimes:
        """Iteration times for successors and replacements."""
        return IterationTimes(
            slowest_s=round(self.slowest_s, 6), typical_s=round(self.typical_s, 6), evaluation_s=round(self.evaluation_s, 6)
        )

    def load(self, times: IterationTimes | None = None, *, waited: Iterable[tuple[int, int, float]] = ()) -> None:
        """Takes over what another invocation knows; own, longer times stay.

        Args:
            times: its `state`.
            waited: rank, iteration and seconds for which predecessors had waited when they ended.
        """
        if times is not None:
            self.slowest_s = max(self.slowest_s, times.slowest_s)
            self.typical_s = self.typical_s or times.typical_s
            self.evaluation_s = self.evaluation_s or times.evaluation_s
        self.waited_before_s |= {(rank, iteration): seconds for rank, iteration, seconds in waited}
