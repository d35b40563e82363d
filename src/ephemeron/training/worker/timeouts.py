"""How long peers may keep a rank waiting, learned from how long iterations take. Pure.

One rule for all patterns: whoever is silent for ten times the slowest iteration known is suspected, and never sooner than
the run's shortest patience. What counts is what ranks spend on an iteration without waiting for each other, so that a death,
for which all wait, makes nobody more patient with the next one. Every message says how long its sender knows iterations to
take, and what one invocation has learned goes to its successors and to those it starts in place of others: nobody begins
without a notion of how slow the run is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ephemeron.training.collectives.pace import SLOWER, PeerPace

SMOOTH = 0.7
"""Share of the typical iteration that the next one leaves of it."""
FADING = 0.9
"""Share of the slowest iteration that the next one leaves of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """Iteration times that one invocation knows."""

    slowest_s: float = 0.0
    """Slowest recent iteration of any rank, without waits."""
    typical_s: float = 0.0
    """Typical iteration of the rank itself, with waits; 0: not known."""


@dataclass(slots=True, kw_only=True)
class Timeouts:
    """What one invocation knows of paces."""

    least_s: float
    """Shortest wait before a peer is suspected."""
    slowest_s: float = 0.0
    """Of recent iterations, anybody's, without waits."""
    typical_s: float = 0.0
    """Of an iteration of this rank, with waits; 0: none is known."""
    peers: dict[int, PeerPace] = field(default_factory=dict)
    before_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By rank and iteration, how long predecessors had waited when they left."""
    _began_s: float | None = None
    _listening_s: float | None = None
    """Since when."""
    _disturbed: bool = False

    def begin(self, now_s: float) -> None:
        """An iteration begins."""
        self._began_s, self._disturbed = now_s, False
        self.listen(now_s)

    def listen(self, now_s: float) -> None:
        """From now on peers can be heard."""
        self._listening_s = now_s if self._listening_s is None else self._listening_s

    def disturbed(self) -> None:
        """Somebody was late: the iteration takes longer than others."""
        self._disturbed = True

    def end(self, now_s: float, *, busy_s: float) -> None:
        """The iteration that has begun is over; harmless when there is none.

        Args:
            now_s: seconds, as for `begin`.
            busy_s: what it took without waits.
        """
        if self._began_s is not None:
            took = now_s - self._began_s
            self.slowest_s = max(FADING * self.slowest_s, busy_s)
            if not self._disturbed:
                self.typical_s = SMOOTH * (self.typical_s or took) + (1 - SMOOTH) * took
            self._began_s = None

    def computed(self, seconds: float) -> None:
        """A part of an iteration that is not over: peers may need as long, and more."""
        self.slowest_s = max(self.slowest_s, seconds)

    def heard(self, rank: int, now_s: float, busy_s: float) -> None:
        """Something new of a peer is there, who knows iterations to take so long."""
        self.slowest_s = max(self.slowest_s, busy_s)
        pace = self._pace(rank, now_s)
        pace.tells = True
        pace.came(now_s)

    def seen(self, rank: int, now_s: float, *, iterations: int) -> None:
        """A peer that sends nothing to this rank has done so many iterations more."""
        pace = self._pace(rank, now_s)
        if not pace.tells:
            pace.usual_s = max(pace.usual_s, (now_s - pace.since_s) / iterations)
        pace.came(now_s)
        self.before_s = {wait: seconds for wait, seconds in self.before_s.items() if wait[0] != rank}

    def delivered(self, iteration: int) -> None:
        """All ranks have delivered an iteration: what predecessors have waited for it counts no more."""
        self.before_s = {wait: seconds for wait, seconds in self.before_s.items() if wait[1] > iteration}

    def _pace(self, rank: int, now_s: float) -> PeerPace:
        if rank not in self.peers:
            self.peers[rank] = PeerPace(now_s if self._listening_s is None else self._listening_s)
        return self.peers[rank]

    def usual_s(self) -> float:
        """Silence after which a peer is late."""
        return max(self.least_s, SLOWER * self.slowest_s)

    def late_after_s(self, rank: int, *, within_s: float) -> float:
        """Silence after which one peer is late, given its own pace.

        Args:
            rank: of the peer.
            within_s: see the method of that name.
        """
        usual_s = self.peers[rank].usual_s if rank in self.peers else 0.0
        return min(max(self.usual_s(), SLOWER * usual_s), max(within_s, 2 * usual_s))

    def silent_s(self, rank: int, now_s: float) -> float | None:
        """How long a peer has been silent; None: it was never heard."""
        pace = self.peers.get(rank)
        return None if pace is None else now_s - pace.since_s

    def waited_s(self, rank: int, iteration: int, now_s: float) -> float:
        """Seconds for which this invocation has waited for news of a rank, in the iteration that has begun, and those before it."""
        since_s = self._listening_s if self._began_s is None else self._began_s
        silent_s = self.silent_s(rank, now_s)
        waited_s = 0.0 if since_s is None else now_s - since_s
        return self.before_s.get((rank, iteration), 0.0) + (waited_s if silent_s is None else min(waited_s, silent_s))

    def within_s(self, *, lifetime_s: float, cold_start_s: float) -> float:
        """Time in which whoever lives no longer has to have suspected somebody, if ever."""
        return max(0.2 * lifetime_s, 2 * self.slowest_s + cold_start_s)

    def state(self) -> IterationTimes:
        """Iteration times for successors and replacements."""
        return IterationTimes(slowest_s=round(self.slowest_s, 6), typical_s=round(self.typical_s, 6))

    def load(self, times: IterationTimes | None = None, *, waited: Iterable[tuple[int, int, float]] = ()) -> None:
        """Takes over what another invocation knows; own, longer times stay.

        Args:
            times: its `state`.
            waited: rank, iteration and seconds for which predecessors had waited when they ended.
        """
        if times is not None:
            self.slowest_s = max(self.slowest_s, times.slowest_s)
            self.typical_s = self.typical_s or times.typical_s
        self.before_s |= {(rank, iteration): seconds for rank, iteration, seconds in waited}
