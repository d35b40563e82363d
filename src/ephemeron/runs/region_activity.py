"""What a region does while it trains: step rate, waiting, staleness and bytes, from its events. Pure: live views and reports read the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ephemeron.events import Ended, Event, GroupStarted, Invoked, Progress, RegionAdded, RegionExchanged, RegionResized, RunStarted

RECENT = 20
"""Iterations that the step rate is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityPoint:
    """Totals of a region after one of its exchanges."""

    t: float
    iterations: int
    waiting_share: float
    bytes_sent: int


@dataclass(slots=True)
class RegionActivity:
    """Activity of one region, kept current by `feed`.

    Args:
        started: the region, as the run's first event describes it.
    """

    started: GroupStarted
    wan_bytes_sent: int = 0
    """To other regions, as the region has metered."""
    wan_bytes_received: int = 0
    wan_kernel_bytes_sent: int = 0
    """Of these, over TCP, as the kernel has counted: repeated segments and encryption included; 0 where regions have no connections."""
    wan_kernel_bytes_received: int = 0
    exchanges: int = 0
    staleness: int = 0
    """Rounds that it is ahead of what it has applied of the region furthest behind, at its latest exchange."""
    waited_s: float = 0.0
    """In exchanges: sending, and waiting for other regions."""
    released: int = 0
    """Functions that have ended until the last exchange was over, as the region had done its share before the others."""
    released_s: float = 0.0
    """Time that these together were not there, and are not billed."""
    resized: list[RegionResized] = field(default_factory=list)
    """Changes of its functions."""
    points: list[ActivityPoint] = field(default_factory=list)
    """One for each exchange."""
    _begun: float | None = None
    _latest: float = 0.0
    _iterations: int = 0
    _recent: deque[tuple[float, int]] = field(default_factory=deque)
    """Times at which its first rank has ended iterations, and the iterations until then; some may be left out."""

    _gone: dict[int, float] = field(default_factory=dict)
    """By rank: when it has ended so."""

    def feed(self, event: Event) -> None:
        """Takes an event of one of the region's ranks, or of its functions together, into account."""
        if isinstance(event, RegionResized):
            self.resized.append(event)
        if isinstance(event, Ended) and event.outcome == "released":
            self.released += 1
            self._gone[event.rank] = event.t
        elif isinstance(event, Invoked) and event.rank in self._gone:
            self.released_s += event.t - self._gone.pop(event.rank)
        first = getattr(event, "rank", None) == self.started.first_rank
        if isinstance(event, Progress) and first:
            begun = min((start for _, start, _ in event.spans), default=event.t)
            self._begun = begun if self._begun is None else min(self._begun, begun)
            self._latest = max(self._latest, event.t)
            if event.iteration + 1 > self._iterations:  # others are repeated
                self._iterations = event.iteration + 1
                self._recent.append((event.t, self._iterations))
                while len(self._recent) > 2 and self._iterations - self._recent[1][1] >= RECENT:
                    self._recent.popleft()
        elif isinstance(event, RegionExchanged):
            self._latest = max(self._latest, event.t)
            self.wan_bytes_sent += event.bytes_sent
            self.wan_bytes_received += event.bytes_received
            self.wan_kernel_bytes_sent += event.kernel_bytes_sent
            self.wan_kernel_bytes_received += event.kernel_bytes_received
            self.exchanges, self.staleness = self.exchanges + 1, event.staleness
            self.waited_s += event.seconds
            self.points.append(
                ActivityPoint(t=event.t, iterations=event.iteration, waiting_share=self.waiting_share, bytes_sent=self.wan_bytes_sent)
            )

    @property
    def workers(self) -> int:
        """Functions now."""
        return self.resized[-1].workers if self.resized else self.started.workers

    @property
    def steps_per_s(self) -> float:
        """Iterations a second over the latest of them, exchanges included; 0 before the second one."""
        if len(self._recent) < 2:
            return 0.0
        (begun, before), (ended, now) = self._recent[0], self._recent[-1]
        return (now - before) / (ended - begun) if ended > begun else 0.0

    @property
    def waiting_share(self) -> float:
        """Part of the time since its first iteration that the region has spent in exchanges."""
        if self._begun is None or self._latest <= self._begun:
            return 0.0
        return min(1.0, self.waited_s / (self._latest - self._begun))


def region_activities(events: Iterable[Event]) -> list[RegionActivity]:
    """Activities of all regions of a run, in their order; empty: its functions are one group.

    Args:
        events: of the run, in the order of their times.
    """
    found: list[RegionActivity] = []
    for event in events:
        if isinstance(event, RunStarted) and not found:
            found = [RegionActivity(group) for group in event.groups]
        elif isinstance(event, RegionAdded):
            found.append(RegionActivity(event.group))
        rank, region = getattr(event, "rank", None), event.region if isinstance(event, RegionResized) else None
        for each in found:
            if region == each.started.name or (rank is not None and each.started.has(rank)):
                each.feed(event)
    return found
