"""Cost and work of a run, from its events. Pure: the same for a live, a finished and a simulated run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ephemeron.events import (
    PHASES,
    Checkpointed,
    Continued,
    Ended,
    Evaluated,
    Event,
    GenerationStarted,
    GroupStarted,
    Invoked,
    Loaded,
    Measured,
    Phase,
    Progress,
    RegionAdded,
    RegionResized,
    RunStarted,
    Started,
    StoreRequests,
    Suspended,
    Traffic,
    Woken,
)
from ephemeron.prices import Prices
from ephemeron.runs.region_activity import RegionActivity
from ephemeron.units import MB

if TYPE_CHECKING:
    from ephemeron.runs.metrics import Metrics

CHECKPOINTS, ITERATIONS = 2, 2
"""Checkpoints of each rank, and iterations of messages, that a channel holds at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Billed quantities."""

    gb_seconds: float
    requests: int
    """Invocations."""
    storage_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSummary:
    """A region in the result of its run: its functions, and what it has exchanged with others."""

    name: str
    platform: str = ""
    workers: int = 0
    memory_mb: int = 0
    samples: int = 0
    """Of the training set."""
    iterations: int
    invocations: int = 0
    gb_seconds: float = 0.0
    cost_usd: float
    prices: str = ""
    """Name and date of its price list."""
    released_s: float = 0.0
    """Time of its functions together that was not billed, as they had ended until the last exchange with other regions was over."""
    waiting_share: float
    """Part of its time that the region has spent in exchanges: sending, and waiting for other regions."""
    wan_bytes_sent: int
    """To all other regions together, as metered by the region."""
    wan_bytes_received: int
    wan_kernel_bytes_sent: int = 0
    """The same over TCP, as the kernel has counted; 0 where regions have no connections, and in results of earlier releases."""
    wan_kernel_bytes_received: int = 0


@dataclass(slots=True)
class Membership:
    """The generations of a run, as far as they are known."""

    first: RunStarted | None = None
    """First start of the run; None: it was not seen."""
    later: dict[int, GenerationStarted] = field(default_factory=dict)
    """By number, from 1 on."""

    def feed(self, event: Event) -> None:
        """Takes one event into account."""
        if isinstance(event, RunStarted):
            self.first = self.first or event
        elif isinstance(event, GenerationStarted):
            self.later[event.generation] = event

    @property
    def workers(self) -> int:
        """Functions now."""
        if self.later:
            return self.later[max(self.later)].workers
        return 0 if self.first is None else self.first.workers

    @property
    def iterations(self) -> int:
        """Iterations of the whole run, as far as it is known now."""
        if self.later:
            return self.later[max(self.later)].iterations
        return 0 if self.first is None else self.first.iterations

    def workers_at(self, iteration: int) -> int:
        """Functions that compute an iteration. Those that evaluate before it are those of the iteration before."""
        begun = [number for number, event in self.later.items() if event.from_iteration <= iteration]
        if begun:
            return self.later[max(begun)].workers
        return 0 if self.first is None else self.first.workers


@dataclass(slots=True)
class CostMeter:
    """Totals over all invocations, kept current by `feed`."""

    prices: Prices
    servers: int = 0
    """Machines that are paid by the hour."""
    invocations: int = 0
    gb_seconds: float = 0.0
    burst_vcpu_s: float = 0.0
    suspended_usd: float = 0.0
    """Of suspensions that are over, and of the writing of one that is not."""
    phases_s: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    done: dict[int, int] = field(default_factory=dict)
    """Per rank, iterations finished."""
    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Per rank, its latest loss, and the number of things that this is a mean over."""
    memory_mb: int = 0
    ended_at: float = 0.0
    evaluations: dict[int, dict[int, Evaluated]] = field(default_factory=dict)
    """By iteration and rank."""
    measured: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """By iteration, metrics that functions have merged."""
    checkpoints: dict[int, list[int]] = field(default_factory=dict)
    """Per rank, bytes of its checkpoints."""
    members: Membership = field(default_factory=Membership)
    groups: list[GroupMeter] = field(default_factory=list)
    """Of the groups of functions, each with its own prices; empty: there is one group."""
    _own: Traffic = field(default_factory=Traffic)
    _traffic: dict[str, Traffic] = field(default_factory=dict)
    _invoked: dict[str, Invoked] = field(default_factory=dict)
    _of: dict[tuple[int, int], str] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        """Takes one event into account. Feeding an event twice is a mistake; repeated iterations are not."""
        self.ended_at = max(self.ended_at, event.t)
        self.members.feed(event)
        for group in self.groups:
            group.feed(event)
        match event:
            case RunStarted():
                self._own += event.traffic
                self.memory_mb = event.memory_mb
                if event.groups and not self.groups:
                    self.groups = [GroupMeter(group) for group in event.groups]
                    self._own = sum((group.traffic for group in event.groups), self._own)
            case RegionAdded():
                self.groups.append(GroupMeter(event.group))
                self._own += event.group.traffic
            case Invoked():
                self.invocations += 1
                self._invoked[event.invocation] = event
            case Started():  # of two deliveries of a call, only the one that is not fenced off says so
                self._of[event.rank, event.attempt] = event.invocation
            case Continued():
                self._of[event.rank, event.attempt] = event.invocation
            case GenerationStarted():
                self.memory_mb = event.memory_mb
            case Progress():
                self._saw(self._of.get((event.rank, event.attempt), ""), event.traffic)
                self.done[event.rank] = max(self.done.get(event.rank, 0), event.iteration + 1)
                self.losses[event.rank] = event.loss, event.terms
                self._spend(event.spans)
            case Loaded():
                self._spend(event.spans)
            case Evaluated():
                self.evaluations.setdefault(event.iteration, {})[event.rank] = event
            case Suspended():
                self.suspended_usd += self.prices.suspended_usd(event.gb, 0.0, resumed=False)
            case Woken():
                whole = self.prices.suspended_usd(event.gb, event.seconds, resumed=True)
                self.suspended_usd += whole - self.prices.suspended_usd(event.gb, 0.0, resumed=False)
                for id, invoked in self._invoked.items():
                    self._invoked[id] = replace(invoked, t=invoked.t + event.seconds)
            case Checkpointed():
                self.checkpoints.setdefault(event.rank, []).append(event.nbytes)
            case StoreRequests():
                self._saw(event.source, event.traffic)
            case Measured():
                self.measured[event.iteration] = event.metrics
            case Ended():
                self.gb_seconds += event.gb_seconds
                self.burst_vcpu_s += event.burst_vcpu_s
                self._invoked.pop(event.invocation, None)
                self._saw(event.invocation, event.traffic)

    @property
    def loss(self) -> float:
        """Mean of the ranks' latest losses by what each is a mean over; 0 before the first."""
        terms = sum(weight for _, weight in self.losses.values())
        return sum(loss * weight for loss, weight in self.losses.values()) / (terms or 1.0)

    def _saw(self, invocation: str, traffic: Traffic) -> None:
        known = self._traffic.get(invocation)
        if known is None or _amount(traffic) >= _amount(known):
            self._traffic[invocation] = traffic

    def _spend(self, spans: list[tuple[Phase, float, float]]) -> None:
        for phase, start, end in spans:
            self.phases_s[phase] += end - start

    def finished(self, workers: int = 0) -> int:
        """Iterations that all functions have finished.

        Of groups, which may have different numbers of them: of as many as the group with most of them has, the share that
        the group that is furthest behind has done.

        Args:
            workers: number of functions at first; 0: as the run's start has told.
        """
        if self.groups:
            most = max(group.started.iterations for group in self.groups)
            return min(group.iterations() * most // max(group.started.iterations, 1) for group in self.groups)
        now = self.members.workers if self.members.later else workers or self.members.workers
        return min((self.done.get(rank, 0) for rank in range(now)), default=0)

    def is_evaluated(self, iteration: int) -> bool:
        """Whether all functions have evaluated before an iteration; of groups, those of all that train."""
        known = self.evaluations.get(iteration, {})
        if self.groups:
            return all(known.keys() >= set(group.ranks) for group in self.groups if group.meter.done)
        return len(known) >= self.members.workers_at(iteration - 1)

    @property
    def traffic(self) -> Traffic:
        """All channel operations, the trigger's included. What a killed function did after its last report is lost."""
        total = self._own
        for traffic in self._traffic.values():
            total = total + traffic
        return total

    @property
    def kept_bytes(self) -> float:
        """Bytes that the channel holds at a time: uploads of the client, the newest checkpoints and messages.

        Messages of an iteration are everything else that functions uploaded, divided by the iterations.
        """
        newest = sum(sum(sizes[-CHECKPOINTS:]) for sizes in self.checkpoints.values())
        uploaded = sum(t.bytes_up for t in self._traffic.values()) - sum(map(sum, self.checkpoints.values()))
        messages = max(uploaded, 0) / max(self.done.values(), default=1)
        return self._own.bytes_up + newest + ITERATIONS * messages

    def gb_seconds_at(self, t: float) -> float:
        """Billed so far, with running functions as if they ended at `t`."""
        if self.groups:
            return sum(group.meter.gb_seconds_at(t) for group in self.groups)
        running = sum(max(0.0, t - i.t) for i in self._invoked.values())
        return self.gb_seconds + running * self.memory_mb / 1024

    def storage_usd(self, t: float) -> float:
        """Requests, bytes moved through the store and over direct links, bytes kept and servers until `t`."""
        if self.groups:
            return sum(group.meter.storage_usd(t) for group in self.groups)
        return (
            self.prices.storage_usd(self.traffic)
            + self.prices.kept_usd(self.kept_bytes / MB / 1000, t)
            + self.servers * self.prices.server_hour_usd * t / 3600
        )

    def cost_usd(self, t: float) -> float:
        """Everything until `t`."""
        if self.groups:
            return sum(group.cost_usd(t) for group in self.groups)
        functions = self.prices.functions_usd(self.gb_seconds_at(t), self.invocations) + self.suspended_usd
        return functions + self.burst_vcpu_s * self.prices.burst_vcpu_second_usd + self.storage_usd(t)


class GroupMeter:
    """Totals of one group of functions.

    Args:
        started: the group, as the run's first event describes it.
    """

    def __init__(self, started: GroupStarted) -> None:
        self.started = started
        self.meter = CostMeter(Prices(**started.prices), servers=started.servers, memory_mb=started.memory_mb, _own=started.traffic)
        self.activity = RegionActivity(started)

    def feed(self, event: Event) -> None:
        """Takes an event into account if it is of one of the group's ranks, or of its functions together."""
        rank = getattr(event, "rank", None)
        if rank is not None and self.started.has(rank):
            self.meter.feed(event)
            self.activity.feed(event)
        elif isinstance(event, RegionResized) and event.region == self.started.name:
            self.meter.memory_mb = event.memory_mb
            self.activity.feed(event)

    @property
    def ranks(self) -> list[int]:
        """Its ranks in the run, of its functions now."""
        return [self.started.rank(own) for own in range(self.activity.workers)]

    def iterations(self) -> int:
        """Iterations that all of its functions have finished."""
        return min((self.meter.done.get(rank, 0) for rank in self.ranks), default=0)

    def region(self, t: float) -> RegionSummary:
        """The group as a region, until `t`."""
        activity, g = self.activity, self.started
        return RegionSummary(
            name=g.name,
            platform=g.platform,
            workers=g.workers,
            memory_mb=g.memory_mb,
            samples=g.samples,
            iterations=self.iterations(),
            invocations=self.meter.invocations,
            gb_seconds=round(self.meter.gb_seconds_at(t), 6),
            prices=f"{self.meter.prices.name}, {self.meter.prices.as_of}",
            released_s=round(activity.released_s, 3),
            waiting_share=round(activity.waiting_share, 4),
            wan_bytes_sent=activity.wan_bytes_sent,
            wan_bytes_received=activity.wan_bytes_received,
            cost_usd=round(self.cost_usd(t), 9),
            wan_kernel_bytes_sent=activity.wan_kernel_bytes_sent,
            wan_kernel_bytes_received=activity.wan_kernel_bytes_received,
        )

    def cost_usd(self, t: float) -> float:
        """Everything until `t`."""
        return self.meter.cost_usd(t)


def _amount(traffic: Traffic) -> tuple[int, int]:
    """Order of two readings of the same counters."""
    return traffic.puts + traffic.gets + traffic.polls, traffic.direct_bytes


def latest_metrics(ledger: CostMeter) -> Metrics:
    """Metrics of the latest evaluation."""
    from ephemeron.runs.metrics import means  # loads NumPy

    if not ledger.evaluations:
        return means(())
    latest = max(ledger.evaluations)
    merged = ledger.measured.get(latest)
    return means(ledger.evaluations[latest].values()) if merged is None else merged
