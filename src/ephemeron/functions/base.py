"""The port `Platform`, implemented by this machine, the simulator and clouds.

A platform starts calls and reports how they ended and what they cost. It does not depend on training. It may
start the same call twice (clouds do): workers fence themselves by `(run, rank, attempt)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from ephemeron.config.typed import build
from ephemeron.events import Ended, Event, Status, Traffic

Reason = Literal["start", "relay", "replacement", "duplicate", "resume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a platform."""

    memory_min_mb: int = 128
    memory_max_mb: int = 10240
    memory_step_mb: int = 1
    sizes_mb: tuple[int, ...] = ()
    """The only memory quotas that there are, the default of runs first; empty: all within the bounds."""
    deploy: str = ""
    """Command that deploys further sizes."""
    mb_per_vcpu: float = 1769.0
    """Memory quota that comes with one whole vCPU (AWS Lambda: 1,769 MB)."""
    lifetime_s: float = 900.0
    """Longest time one invocation may run."""
    payload_bytes: int = 262_144
    """Largest call (AWS Lambda, asynchronous: 256 KB)."""
    concurrency: int = 1000
    more: str = ""
    """Remedy for a concurrency that is too low, in one line; empty: none."""
    packages: frozenset[str] | None = None
    """Names of the packages that functions have beside this package's own; None: not known, or all that the client has."""

    def vcpus(self, memory_mb: int) -> float:
        """CPU share that comes with a memory quota."""
        return memory_mb / self.mb_per_vcpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a function: small, plain JSON, and without secrets but the run's key."""

    run: str
    rank: int
    attempt: int
    memory_mb: int
    lifetime_s: float
    channel: str
    """Address of the channel, without credentials."""
    entry: str = "worker"
    """Kind of work: a name of `functions.entries`."""
    reason: Reason = "start"
    origin: float = 0.0
    """Unix time of the run's t = 0; in the simulator, virtual time. 0 on the local platform: the start of its daemon."""
    duplicate: bool = False
    """The call is started twice, as a cloud may do. Platforms reset it, so that a successor is started once."""
    key: str = field(default="", repr=False)
    """Key of the run, by which its functions recognise its objects (`communication.signing`). It is never stored or logged.
    Empty: the function executes nothing from the channel."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the run."""
    request: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the entry, which gets them as its own dataclass."""

    @property
    def log_fields(self) -> dict[str, str | int]:
        """Fields of all that a function logs for this call; see `logs.context`."""
        found: dict[str, str | int] = {"run": self.run, "rank": self.rank, "attempt": self.attempt}
        return {**found, "labels": ",".join(f"{k}={v}" for k, v in self.labels.items())} if self.labels else found

    def to_payload(self) -> dict[str, object]:
        """The call as plain JSON."""
        return asdict(self)

    @classmethod
    def from_payload(cls, payload: object) -> Call:
        """The inverse of `to_payload`.

        Raises:
            JobError: the payload is not a call.
        """
        return build(cls, payload, where="call")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of an invocation, and its bill."""

    status: Status
    value: Mapping[str, object] = field(default_factory=dict)
    """Result of the function's code, JSON; empty unless the status is `ok`."""
    error: str = ""
    billed_s: float = 0.0
    gb_seconds: float = 0.0
    burst_vcpu_s: float = 0.0
    """vCPU-seconds beyond what comes with the memory, where these are billed."""
    peak_memory_mb: float = 0.0


class Invocation(ABC):
    """One started call."""

    id: str
    call: Call

    @abstractmethod
    async def wait(self) -> Outcome:
        """Waits for its end. A failure is a value, not an exception."""

    @abstractmethod
    async def cancel(self) -> None:
        """Ends it now. Harmless when it has ended already."""


class Platform(ABC):
    """Starts functions.

    Contract, tested by `ephemeron.testing.PlatformContract`:

    - memory quota, lifetime and CPU share are enforced, or `unenforced` names those that are not.
    - an invocation shares nothing with another one but the channel: fresh scratch folder, no globals that
      matter. Its process may be a reused, warm one of the same code.
    - the bill is exact to the millisecond, rounded up.
    - invocations outlive the object that started them: closing a platform detaches from them.
    """

    name: str
    limits: Limits
    unenforced: tuple[str, ...] = ()
    """Sentences, one for each limit that cannot be enforced here."""

    @abstractmethod
    async def invoke(self, call: Call) -> Invocation:
        """Starts a function.

        Raises:
            InvocationRefused: payload, memory, lifetime or concurrency is beyond the limits, or there is no such entry.
        """

    @abstractmethod
    def events(self, run: str) -> AsyncIterator[Event]:
        """All events of the run's functions and of the platform, from the beginning of the run, without end."""

    @abstractmethod
    async def emit(self, run: str, event: Event) -> None:
        """Adds an event of the driver to the run's stream."""

    @abstractmethod
    async def cancel_all(self, run: str) -> None:
        """Ends all invocations of the run, also those of other clients."""

    @abstractmethod
    async def close(self) -> None:
        """Detaches. Running functions go on."""


class Suspendable(ABC):
    """A platform whose functions can be suspended: they keep their memory, compute nothing, and are not billed for computing."""

    @abstractmethod
    async def suspend(self, run: str) -> int:
        """Suspends all functions of the run; returns how many. Functions that start meanwhile are suspended, too.

        Raises:
            PlatformError: one cannot be suspended; the others are.
        """

    @abstractmethod
    async def wake(self, run: str) -> int:
        """Lets all suspended functions of the run go on; returns how many.

        Raises:
            PlatformError: one cannot be resumed; the others are.
        """


def ended_event(call: Call, invocation: str, outcome: Outcome, *, t: float) -> Ended:
    """The event that every platform emits when an invocation ends."""
    value = outcome.value
    return Ended(
        t=t,
        rank=call.rank,
        attempt=call.attempt,
        invocation=invocation,
        status=outcome.status,
        outcome=str(value.get("outcome", "")),
        error=outcome.error,
        billed_s=outcome.billed_s,
        gb_seconds=outcome.gb_seconds,
        burst_vcpu_s=outcome.burst_vcpu_s,
        memory_mb=call.memory_mb,
        peak_memory_mb=outcome.peak_memory_mb,
        traffic=build(Traffic, value.get("traffic", {}), where="traffic of a result"),
    )
