"""Events of a run, as small values that are saved as one JSON line each.

Workers and platforms emit events; progress bars, the supervisor, the meter and the report only read them.
`t` is always seconds since the run was first launched, on the run's own clock (virtual in the simulator).
An event stream may hold the same fact twice (a replaced function repeats iterations): readers keep the
highest attempt.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Phase = Literal["load", "compute", "upload", "aggregate", "download", "wait"]
PHASES: tuple[Phase, ...] = ("load", "compute", "upload", "aggregate", "download", "wait")

Status = Literal["ok", "error", "timed_out", "out_of_memory", "lost", "cancelled"]
"""End of an invocation. `lost`: it vanished; `cancelled`: we ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Operations on the store and bytes over direct links so far in one invocation, training and bookkeeping together."""

    puts: int = 0
    gets: int = 0
    """Reads that brought an object back."""
    polls: int = 0
    """Reads that found nothing yet."""
    deletes: int = 0
    lists: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    direct_bytes_sent: int = 0
    """Bytes sent to other functions over direct links: no request, and not in `bytes_up`."""
    direct_bytes_received: int = 0

    @property
    def requests(self) -> int:
        """Requests of every kind to the store."""
        return self.puts + self.gets + self.polls + self.deletes + self.lists

    @property
    def direct_bytes(self) -> int:
        """Bytes sent and received over direct links."""
        return self.direct_bytes_sent + self.direct_bytes_received

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    kind: ClassVar[str]
    t: float
    """Seconds since the run was first launched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStarted:
    """A group of functions of a run; see `RunStarted.groups`."""

    name: str
    platform: str
    first_rank: int
    """Of its ranks in the run."""
    workers: int
    memory_mb: int
    iterations: int
    samples: int
    servers: int
    """Parameter servers."""
    prices: dict[str, Any]
    """Its price list."""
    traffic: Traffic
    """Traffic of the client while it prepared the group."""
    most_workers: int = 0
    """Functions that it may grow to; 0: as many as it starts with."""

    more_ranks: int = 0
    """First rank in the run of the functions that it may grow by: they come after those that all groups start with."""
    predicted_waiting_share: float | None = None
    """Part of an epoch in which it is expected to wait for the slowest group; None: not known. Exchanges are left out of predictions."""
    predicted_epoch_s: float = 0.0
    """Expected seconds of an epoch of all groups; 0: not known."""
    predicted_epoch_usd: float = 0.0
    """Expected price of its functions for so long; 0: not known."""

    def rank(self, own: int) -> int:
        """Rank in the run of one of its own ranks."""
        return self.first_rank + own if own < self.workers else self.more_ranks + own - self.workers

    def has(self, rank: int) -> bool:
        """Whether a rank of the run is one of this group, or may become one."""
        return (
            self.first_rank <= rank < self.first_rank + self.workers
            or self.more_ranks <= rank < self.more_ranks + self.most_workers - self.workers
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """First line of every run, and again after each resume."""

    kind: ClassVar[str] = "run_started"
    run_id: str
    job: str
    workers: int
    aggregators: int
    memory_mb: int
    iterations: int
    """Iterations in the whole run, over all epochs."""
    epochs: int
    samples: int
    configuration: dict[str, Any] = field(default_factory=dict)
    platform: str = ""
    wall_time: float = 0.0
    """Unix time at t=0, for display only."""
    merges_evaluations: bool = False
    """Whether functions merge their evaluations: a `Measured` then follows the `Evaluated` of all ranks."""
    notes: list[str] = field(default_factory=list)
    """Limits that the platform cannot enforce here, and other notes for the reader."""
    traffic: Traffic = field(default_factory=Traffic)
    """Traffic of the client while it prepared the run."""
    groups: list[GroupStarted] = field(default_factory=list)
    """Groups of functions with prices of their own; empty: all functions are one group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoked(Event):
    """The platform accepted a call."""

    kind: ClassVar[str] = "invoked"
    rank: int
    attempt: int
    invocation: str
    reason: Literal["start", "relay", "replacement", "duplicate", "resume"] = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The function's code runs."""

    kind: ClassVar[str] = "started"
    rank: int
    attempt: int
    invocation: str
    cold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued(Event):
    """An invocation goes on as a member of another generation of the run."""

    kind: ClassVar[str] = "continued"
    rank: int
    attempt: int
    """From now on; those of a later generation are larger."""
    before: int
    """Attempt that it was until now."""
    invocation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStarted(Event):
    """The functions of the run have changed: its next generation can begin."""

    kind: ClassVar[str] = "generation_started"
    generation: int
    """Number, from 1 on: a run begins with generation 0."""
    from_iteration: int
    from_epoch: int
    workers: int
    memory_mb: int
    aggregators: int
    batch_size: int
    nonaggregator_batch_size: int
    iterations: int
    """Iterations of the whole run, as far as it is known now."""
    request: str = ""
    """Name of the request that led to it; empty: the job's schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """One rank finished one iteration."""

    kind: ClassVar[str] = "progress"
    rank: int
    attempt: int
    iteration: int
    epoch: int
    samples: int
    """Samples in this rank's batch."""
    loss: float
    """Mean loss over this rank's batch, before the step."""
    weight: float | None = None
    """Number of things that loss and metrics are means over; None: the samples."""
    version: int
    """Number of merged updates that the parameters had when the gradient was computed."""
    spans: list[tuple[Phase, float, float]] = field(default_factory=list)
    """(phase, start, end) in run seconds; transfers may overlap, `wait` is what nothing else covers."""
    traffic: Traffic = field(default_factory=Traffic)
    """Traffic of this invocation so far."""
    cpu_s: float = 0.0
    """CPU seconds of this invocation so far, loading included; 0 where time is virtual."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers that the program reports for its batch."""

    @property
    def terms(self) -> float:
        """Weight of loss and metrics in a mean over ranks."""
        return self.samples if self.weight is None else self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Event):
    """A function has its code, data and state, and is about to train."""

    kind: ClassVar[str] = "loaded"
    rank: int
    attempt: int
    iteration: int
    """Iteration from which it continues."""
    spans: list[tuple[Phase, float, float]] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """One rank evaluated its slice of the test set."""

    kind: ClassVar[str] = "evaluated"
    rank: int
    attempt: int
    epoch: int
    """Epochs completed."""
    iteration: int
    samples: int
    sums: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    """By metric, its total and the number of its terms; None where there is no such number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Event):
    """Metrics of the whole evaluation data, where functions have merged them (metrics that are no sums, decisions)."""

    kind: ClassVar[str] = "measured"
    rank: int
    attempt: int
    epoch: int
    """Epochs completed."""
    iteration: int
    metrics: dict[str, float | None] = field(default_factory=dict)
    decision: str = ""
    """What follows from them, such as the end of the run; empty: it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed(Event):
    """A rank's whole state is in the channel."""

    kind: ClassVar[str] = "checkpointed"
    rank: int
    attempt: int
    iteration: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionExchanged(Event):
    """A region has exchanged with the others before an iteration."""

    kind: ClassVar[str] = "region_exchanged"
    rank: int
    attempt: int
    iteration: int
    bytes_sent: int
    """Sent to all other regions together since the exchange before."""
    bytes_received: int
    seconds: float
    """Duration of the exchange: sending, and waiting for other regions."""
    staleness: int = 0
    """Rounds that it is ahead of what it has applied of the region furthest behind."""
    plan: str = ""
    """Latest known H, compression, fragments and delay, where these follow the link."""
    kernel_bytes_sent: int = 0
    """Over TCP, as the kernel has counted: repeated segments and encryption included; 0 where regions have no connections."""
    kernel_bytes_received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateQuarantined(Event):
    """What a region has sent was left out: it is not finite, or its norm is far from usual."""

    kind: ClassVar[str] = "update_quarantined"
    rank: int
    attempt: int
    iteration: int
    region: str
    """That has sent it."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionLeft(Event):
    """A region has left the run while the others train on."""

    kind: ClassVar[str] = "region_left"
    rank: int
    attempt: int
    region: str
    round: int
    """The last one that it takes part in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionAdded(Event):
    """A region that was not there at the beginning is started, to join the others."""

    kind: ClassVar[str] = "region_added"
    group: GroupStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionReplanned(Event):
    """A region is asked for another number of functions, by a new plan from measured iteration times."""

    kind: ClassVar[str] = "region_replanned"
    region: str
    workers: int
    """Functions now."""
    wanted: int
    iteration_s: float
    """Seconds of an iteration, as measured, without waits for other regions."""
    time_factor: float
    """Time of the whole run by the plan, relative to that without it."""
    usd_per_hour_before: float
    """Price of the functions of all regions."""
    usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionResized(Event):
    """The functions of a region have changed: the `GenerationStarted` of its group."""

    kind: ClassVar[str] = "region_resized"
    region: str
    workers: int
    memory_mb: int
    batch_size: int
    from_iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFired(Event):
    """An injected fault happened."""

    kind: ClassVar[str] = "fault"
    rank: int
    attempt: int
    fault: str
    iteration: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Event):
    """An invocation ended, and this is its bill."""

    kind: ClassVar[str] = "ended"
    rank: int
    attempt: int
    invocation: str
    status: Status
    outcome: str = ""
    """For `ok`: finished, relayed, stopped, duplicate or fenced."""
    error: str = ""
    billed_s: float = 0.0
    gb_seconds: float = 0.0
    burst_vcpu_s: float = 0.0
    """vCPU-seconds beyond what comes with the memory, where these are billed."""
    memory_mb: int = 0
    peak_memory_mb: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended(Event):
    """Functions of the run keep their memory and do not run."""

    kind: ClassVar[str] = "suspended"
    functions: int
    gb: float
    """Of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Woken(Event):
    """Suspended functions run again."""

    kind: ClassVar[str] = "woken"
    functions: int
    gb: float
    seconds: float
    """For which they were suspended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequests(Event):
    """Requests to the channel by what is no function: shards of a sparse store, the client that drives a run."""

    kind: ClassVar[str] = "store_requests"
    source: str
    """Who counts; unlike the sources of other clients of the run."""
    traffic: Traffic
    """Since it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskBegan(Event):
    """A function begins a task that reports values."""

    kind: ClassVar[str] = "task_began"
    rank: int
    attempt: int
    task: str
    """Its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReported(Event):
    """A task has reported a value before its end. Of one that reports many times a second, some are here."""

    kind: ClassVar[str] = "task_reported"
    rank: int
    attempt: int
    task: str
    """Its id."""
    number: int
    """Of the report, from 1, in this try of the task."""
    step: int
    value: float | None
    """None: it is not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Event):
    """Something a person should read."""

    kind: ClassVar[str] = "note"
    level: Literal["info", "warning", "error"] = "info"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReached(Event):
    """A budget or a time limit ends the run at its next common checkpoint."""

    kind: ClassVar[str] = "limit_reached"
    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """Last line of a run, unless its client went away."""

    kind: ClassVar[str] = "run_ended"
    status: Literal["finished", "stopped", "failed"]
    causes: list[str] = field(default_factory=list)


_KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RunStarted,
        Invoked,
        Started,
        Continued,
        GenerationStarted,
        Loaded,
        Progress,
        Evaluated,
        Measured,
        Checkpointed,
        RegionAdded,
        RegionExchanged,
        RegionLeft,
        RegionReplanned,
        RegionResized,
        UpdateQuarantined,
        FaultFired,
        Ended,
        Suspended,
        Woken,
        StoreRequests,
        TaskBegan,
        TaskReported,
        Note,
        LimitReached,
        RunEnded,
    )
}


def to_json(event: Event) -> str:
    """One line of JSON, without a newline."""
    out: dict[str, Any] = {"kind": event.kind}
    for f in dataclasses.fields(event):
        value = getattr(event, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            value = None  # JSON has no NaN
        elif f.name == "metrics":
            value = {name: v if v is None or math.isfinite(v) else None for name, v in value.items()}
        elif f.name == "sums":
            value = {name: v if v is None or all(map(math.isfinite, v)) else None for name, v in value.items()}
        elif f.name == "groups":
            value = [dataclasses.asdict(group) for group in value]
        elif f.name == "group":
            value = dataclasses.asdict(value)
        out[f.name] = dataclasses.asdict(value) if isinstance(value, Traffic) else value
    return json.dumps(out, separators=(",", ":"), allow_nan=False)


def from_json(line: str) -> Event:
    """The inverse of `to_json`.

    Raises:
        ValueError: the line is no event of ours.
    """
    raw = json.loads(line)
    cls = _KINDS.get(raw.pop("kind", None))
    if cls is None:
        raise ValueError(f"not an event: {line[:80]!r}")
    if "traffic" in raw:
        raw["traffic"] = Traffic(**raw["traffic"])
    if "groups" in raw:
        raw["groups"] = [GroupStarted(**{**group, "traffic": Traffic(**group["traffic"])}) for group in raw["groups"]]
    if "group" in raw:
        raw["group"] = GroupStarted(**{**raw["group"], "traffic": Traffic(**raw["group"]["traffic"])})
    if "spans" in raw:
        raw["spans"] = [tuple(s) for s in raw["spans"]]
    if "sums" in raw:
        raw["sums"] = {name: None if v is None else tuple(v) for name, v in raw["sums"].items()}
    if "metrics" in raw:
        raw["metrics"] = {name: math.nan if v is None and cls is Progress else v for name, v in raw["metrics"].items()}
    if raw.get("loss", 0) is None:
        raw["loss"] = math.nan
    return cls(**raw)
