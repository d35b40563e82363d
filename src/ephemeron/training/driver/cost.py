"""Cost and work of a run, from its events. Pure: the same for a live, a finished and a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
from ephemeron.training.driver.membership import Membership
from ephemeron.training.driver.records import Bill, GenerationSummary, GroupSummary, RegionSummary, ResultSummary, RunTraffic
from ephemeron.training.metrics import Metrics, means
from ephemeron.training.planner.prices import Prices
from ephemeron.training.region_activity import RegionActivity
from ephemeron.training.worker.final import FinalState
from ephemeron.training.worker.spec import RunSpec
from ephemeron.units import MB

CHECKPOINTS, ITERATIONS = 2, 2
"""Checkpoints of each rank, and iterations of messages, that a channel holds at a time."""


@dataclass(slots=True)
class CostMeter:
    """Totals over all invocations, kept current by `feed`."""

    prices: Prices
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

    def storage_usd(self, t: float, servers: int = 0) -> float:
        """Requests, bytes moved through the store and over direct links, bytes kept and servers until `t`."""
        if self.groups:
            return sum(group.meter.storage_usd(t, group.started.servers) for group in self.groups)
        return (
            self.prices.storage_usd(self.traffic)
            + self.prices.kept_usd(self.kept_bytes / MB / 1000, t)
            + servers * self.prices.server_hour_usd * t / 3600
        )

    def cost_usd(self, t: float, servers: int = 0) -> float:
        """Everything until `t`."""
        if self.groups:
            return sum(group.cost_usd(t) for group in self.groups)
        functions = self.prices.functions_usd(self.gb_seconds_at(t), self.invocations) + self.suspended_usd
        return functions + self.burst_vcpu_s * self.prices.burst_vcpu_second_usd + self.storage_usd(t, servers)


class GroupMeter:
    """Totals of one group of functions.

    Args:
        started: the group, as the run's first event describes it.
    """

    def __init__(self, started: GroupStarted) -> None:
        self.started = started
        self.meter = CostMeter(Prices(**started.prices), memory_mb=started.memory_mb, _own=started.traffic)
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
        activity = self.activity
        return RegionSummary(
            name=self.started.name,
            iterations=self.iterations(),
            waiting_share=round(activity.waiting_share, 4),
            wan_bytes_sent=activity.wan_bytes_sent,
            wan_bytes_received=activity.wan_bytes_received,
            cost_usd=round(self.cost_usd(t), 9),
            wan_kernel_bytes_sent=activity.wan_kernel_bytes_sent,
            wan_kernel_bytes_received=activity.wan_kernel_bytes_received,
        )

    def cost_usd(self, t: float) -> float:
        """Everything until `t`."""
        return self.meter.cost_usd(t, self.started.servers)

    def summary(self, t: float) -> GroupSummary:
        """Work and cost until `t`."""
        g = self.started
        return GroupSummary(
            name=g.name,
            platform=g.platform,
            workers=g.workers,
            memory_mb=g.memory_mb,
            samples=g.samples,
            iterations=self.iterations(),
            invocations=self.meter.invocations,
            gb_seconds=round(self.meter.gb_seconds_at(t), 6),
            cost_usd=round(self.cost_usd(t), 9),
            prices=f"{self.meter.prices.name}, {self.meter.prices.as_of}",
            released_s=round(self.activity.released_s, 3),
        )


def _amount(traffic: Traffic) -> tuple[int, int]:
    """Order of two readings of the same counters."""
    return traffic.puts + traffic.gets + traffic.polls, traffic.direct_bytes


def servers_of(spec: RunSpec) -> int:
    """Number of parameter servers of a run. Shards that the client starts are counted as if each had a machine."""
    if spec.sparse is not None:
        return 0 if spec.sparse.spec.store else spec.sparse.spec.shards
    return 1 if spec.configuration.store.startswith(("ps://", "parameter_server")) else 0


def summarize(meter: CostMeter, spec: RunSpec, *, status: str, final: FinalState | None, causes: Sequence[str] = ()) -> ResultSummary:
    """Result of a run.

    Args:
        meter: fed with all events of the run.
        spec: of the run.
        status: `finished`, `stopped` or `failed`.
        final: what rank 0 has written at the end; None: the run has not finished.
        causes: why it has failed, or was stopped.
    """
    c, t = spec.configuration, meter.ended_at
    servers = servers_of(spec)
    done = meter.finished(c.workers)
    metrics = latest_metrics(meter)
    return ResultSummary(
        run_id=spec.run_id,
        status=status,
        causes=tuple(causes),
        seconds=round(t, 3),
        cost_usd=round(meter.cost_usd(t, servers), 9),
        workers=c.workers,
        aggregators=c.aggregators,
        memory_mb=c.memory_mb,
        batch_size_aggregator=c.batch_size,
        batch_size_nonaggregator=c.nonaggregator_batch_size,
        stages=c.stages,
        replicas=c.group,
        micro_batches=c.micro_batches,
        schedule=c.micro_batch_schedule,
        pattern=c.pattern,
        sync=c.sync,
        channel=c.channel,
        exchange=c.exchanged,
        local_steps=c.local_steps,
        compression=c.compression,
        iterations=done if final is None or meter.groups else final.iterations,
        invocations=meter.invocations,
        metrics=metrics if final is None else final.metrics,
        traffic=RunTraffic.of(meter.traffic),
        billed=Bill(
            gb_seconds=round(meter.gb_seconds_at(t), 6), requests=meter.invocations, storage_usd=round(meter.storage_usd(t, servers), 9)
        ),
        weights_sha256=None if final is None else final.weights_sha256,
        generations=_generations(meter, spec),
        groups=tuple(group.summary(t) for group in meter.groups),
        regions=tuple(group.region(t) for group in meter.groups),
        phases_s={phase: round(s, 3) for phase, s in meter.phases_s.items()},
        step_us=_step_us(meter, spec),
        platform="+".join(dict.fromkeys(g.started.platform for g in meter.groups)) or c.platform,
        best_iteration=None if final is None else final.best,
        budget_usd=spec.budget_usd,
        prices=f"{meter.prices.name}, {meter.prices.as_of}",
    )


def _step_us(meter: CostMeter, spec: RunSpec) -> dict[Phase, float]:
    """Of a sparse job, mean microseconds of a step by phase."""
    steps = sum(meter.done.values())
    if spec.sparse is None or not steps:
        return {}
    return {phase: round(1e6 * s / steps, 1) for phase, s in meter.phases_s.items() if s}


def _generations(meter: CostMeter, spec: RunSpec) -> tuple[GenerationSummary, ...]:
    """All generations, the first one included."""
    c, later = spec.configuration, [event for _, event in sorted(meter.members.later.items())]
    first = GenerationSummary(from_iteration=0, workers=c.workers, memory_mb=c.memory_mb)
    return (first, *(GenerationSummary(from_iteration=e.from_iteration, workers=e.workers, memory_mb=e.memory_mb) for e in later))


def latest_metrics(ledger: CostMeter) -> Metrics:
    """Metrics of the latest evaluation."""
    if not ledger.evaluations:
        return means(())
    latest = max(ledger.evaluations)
    merged = ledger.measured.get(latest)
    return means(ledger.evaluations[latest].values()) if merged is None else merged
