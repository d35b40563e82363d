"""Requests and replies of the parts of the service.

Life cycle of the flows of a service, as decisions only (DPFlow section 4.3.2, figure 4-7).

    register ─▶ created ─▶ ready ◀─▶ accessed
                             │  ▲
                          idle_s │ access
                             ▼  │
                            idle ─▶ deleted

Created: described, nothing runs. Ready: its router runs. Accessed: it has readers. Idle: it has had no reader for `idle_s`, and
its router was ended, so an unused flow costs nothing. The paper lets only idle flows be deleted; here created ones can be
deleted as well, which cost as little.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from ephemeron.data.scheduler import Remainder
from ephemeron.data.service.settings import ServiceAddress
from ephemeron.data.service.shard_state import SampleKey
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A request or reply without content."""


# -- coordinator --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterRequest:
    """A flow that a reader describes; its pickle is the buffer."""

    name: str
    version: int
    signature: str
    samples: int
    random: bool
    fixed: int
    dataset: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterReply:
    """Whether the flow was new, updated or known."""

    result: Registered


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRequest:
    """A flow by its name."""

    flow: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessReply:
    """Address of a flow's router."""

    router: ServiceAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """Counters of a shard."""

    readers: int = 0
    loaders: int = 0
    loaded: int = 0
    """Samples loaded from the beginning."""
    hits: int = 0
    """Samples found in the cache."""
    half_hits: int = 0
    """Samples found half-finished in the cache."""
    skipped: int = 0
    buffered_bytes: int = 0
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterStatus:
    """Readers of a flow, and the counters of its shards."""

    readers: int = 0
    generation: int = 0
    shards: tuple[ShardStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReply:
    """Registered flows, and the status of the routers that run."""

    flows: tuple[FlowEntry, ...]
    routers: dict[str, RouterStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class PingReply:
    """Settings of the coordinator, as in its file."""

    settings: Mapping[str, object]


# -- router -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesRequest:
    """A generation of routes whose shards did not answer; None: no routes are known yet."""

    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Addresses of the shards, and the samples of each."""

    generation: int
    edges: tuple[int, ...]
    """Shard k has the samples from edges[k] to below edges[k + 1]."""
    shards: tuple[ServiceAddress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRequest:
    """A reader by its name."""

    reader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReply:
    """The present generation of routes."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A rank that draws samples together with other jobs. The samples of its view are the buffer, unless it has all."""

    job: str
    rank: int
    reader: str
    """Unique name of this reader."""
    samples: int
    """Samples of its view."""
    seed: int
    batch: int
    world_size: int
    remainder: Remainder
    epoch: int
    consumed: str = ""
    """The samples of `epoch` that it has used, as `MarkReply` gave them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReply:
    """The name under which the rank makes all further requests."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TraverseRequest:
    """Batches of a rank, from number `sequence` on."""

    job: str
    rank: int
    epoch: int
    sequence: int
    acked: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraverseReply:
    """The samples of the batches; fewer batches than requested where the epoch ends."""

    batches: Sequence[Sequence[int]]
    left: int
    """Batches of the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRequest:
    """The position of a job after so many batches of each rank."""

    job: str
    epoch: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReply:
    """Samples that a job has used of an epoch: a bit for each, in base64, and their number."""

    consumed: str
    count: int


# -- shard --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A batch of a reader; the samples' numbers (int64) are the buffer."""

    generation: int
    consumer: str
    job: str
    ticket: int
    """Number of the batch; rises."""
    after: int | None
    """The batch requested before this one."""
    received: int | None
    """The last batch of those that have all arrived."""
    epoch: int
    seed: int | None
    once: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReply:
    """A batch; its samples are the buffers, in the order of `sample_codec.layout`."""

    counts: Sequence[int]
    """Buffers of each sample."""
    failed: Sequence[int]
    """Places of samples that are errors."""
    seconds: Mapping[str, float]
    """Time of loaders by stage since the last reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRequest:
    """The samples that a job will use in an epoch; their numbers (int64) are the buffer."""

    generation: int
    job: str
    epoch: int
    seed: int | None
    ordered: bool
    """Whether they are used in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHeartbeat:
    """A reader that is alive, and what it has."""

    generation: int
    consumer: str
    waiting: bool
    """Whether its trainer waits for a batch."""
    received: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerRequest:
    """A reader's name at a shard."""

    consumer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderResult:
    """Result of a loader's invocation."""

    loaded: int
    """Samples."""
    outcome: str = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRequest:
    """A loader by its name."""

    loader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWelcome:
    """Reply to a loader that begins; the pickled flow is the buffer."""

    paths: tuple[str, ...]
    fixed: int
    wants_half: bool
    batch: int
    """Results in a request, at most."""


class ResultRow(NamedTuple):
    """A result of a loader; its buffers follow those of the rows before it, a half-finished sample behind the sample."""

    sample: int
    epoch: int
    seed: int | None
    once: str
    buffers: int
    cost_s: float
    failed: bool
    half_buffers: int
    half_cost_s: float

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.sample, self.epoch, self.seed, self.once)


class TaskRow(NamedTuple):
    """A task of a loader, and the number of buffers of its half-finished sample; 0: there is none."""

    sample: int
    epoch: int
    seed: int | None
    once: str
    buffers: int
    cost_s: float

    @property
    def key(self) -> SampleKey:
        return SampleKey(self.sample, self.epoch, self.seed, self.once)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest:
    """Results of a loader, whose buffers come with it, and its request for tasks."""

    loader: str
    request: int
    done: Sequence[ResultRow]
    running: SampleKey | None
    seconds: Mapping[str, float]
    """Time by stage since the last request."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "done", [ResultRow(*row) for row in self.done])
        if self.running is not None:
            object.__setattr__(self, "running", SampleKey(*self.running))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReply:
    """The whole queue that a loader is to have."""

    tasks: Sequence[TaskRow] = ()
    hold: bool = False
    """The results have arrived; there is nothing to do yet: repeat the request."""
    over: bool = False
    """The loader is to end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", [TaskRow(*row) for row in self.tasks])


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRequest:
    """The router's generation of routes."""

    generation: int


# -- life cycle of the flows of a service -------------------------------------------------------------------------


State: TypeAlias = Literal["created", "ready", "accessed", "idle"]
"""State of a registered flow; deleted flows are removed from the registry."""
Registered: TypeAlias = Literal["new", "updated", "same"]


@dataclass(slots=True, kw_only=True)
class FlowEntry:
    """A registered flow."""

    name: str
    version: int
    signature: str
    """Description of its steps: two definitions of one version must have the same."""
    samples: int
    state: State = "created"
    used_at: float = 0.0
    """Time of the last read or access, on the caller's clock."""


class Registry:
    """All flows of a service.

    Args:
        idle_s: how long a flow without readers keeps its router.
    """

    def __init__(self, *, idle_s: float) -> None:
        self.idle_s = idle_s
        self.flows: dict[str, FlowEntry] = {}

    def __getitem__(self, name: str) -> FlowEntry:
        if name not in self.flows:
            raise JobError(f"no flow {name!r} is registered here", remedy="register it first")
        return self.flows[name]

    def register(self, *, name: str, version: int, signature: str, samples: int, now: float) -> Registered:
        """Adds or updates the description of a flow.

        Raises:
            JobError: an older version than the registered one, or the same version with other steps.
        """
        old = self.flows.get(name)
        if old is not None and version < old.version:
            raise JobError(
                f"flow {name}: version {version} is older than version {old.version}, which the service has",
                remedy="raise the version, or delete the flow from the service",
            )
        if old is not None and version == old.version:
            if (signature, samples) != (old.signature, old.samples):
                raise JobError(
                    f"flow {name}, version {version} is registered with other steps or samples: "
                    f"{old.signature}, {old.samples} samples; this one: {signature}, {samples} samples",
                    remedy="raise the version whenever the flow changes",
                )
            old.used_at = now
            return "same"
        self.flows[name] = FlowEntry(name=name, version=version, signature=signature, samples=samples, used_at=now)
        return "new" if old is None else "updated"

    def set_serving(self, name: str, *, now: float) -> None:
        """Records that a flow's router runs and was asked for."""
        entry = self[name]
        entry.used_at = now
        if entry.state in ("created", "idle"):
            entry.state = "ready"

    def set_readers(self, name: str, *, readers: int, now: float) -> None:
        """Records the number of readers that a flow's router has reported."""
        entry = self[name]
        if readers:
            entry.used_at = now
            entry.state = "accessed"
        elif entry.state == "accessed":  # idleness begins now, however long ago the router was last heard
            entry.used_at = now
            entry.state = "ready"

    def should_restart(self, name: str, *, now: float) -> bool:
        """Whether to restart a lost router. Not indefinitely: readers that are still there request it themselves."""
        entry = self[name]
        if entry.state == "accessed" and now - entry.used_at >= self.idle_s:
            entry.state = "ready"
        return entry.state == "accessed"

    def tick(self, *, now: float) -> tuple[str, ...]:
        """Flows that have just become idle: their routers are to be ended."""
        idle = [e for e in self.flows.values() if e.state == "ready" and now - e.used_at >= self.idle_s]
        for entry in idle:
            entry.state = "idle"
        return tuple(entry.name for entry in idle)

    @property
    def busy(self) -> tuple[str, ...]:
        """Flows that have a router."""
        return tuple(e.name for e in self.flows.values() if e.state in ("ready", "accessed"))

    def delete(self, name: str) -> None:
        """Removes a flow.

        Raises:
            JobError: there is no such flow, or it is in use.
        """
        if self[name].state not in ("created", "idle"):
            raise JobError(
                f"flow {name} is {self[name].state} and cannot be deleted",
                remedy=f"end its readers, and wait until it is idle ({self.idle_s:g} s)",
            )
        del self.flows[name]

    def entries(self) -> tuple[FlowEntry, ...]:
        """Copies of all entries, to be stored."""
        return tuple(replace(entry) for entry in self.flows.values())

    def restore(self, entries: Iterable[FlowEntry], *, now: float) -> None:
        """Takes over stored entries. All of them count as used now, since the clock may be another one."""
        self.flows = {entry.name: replace(entry, used_at=now) for entry in entries}
