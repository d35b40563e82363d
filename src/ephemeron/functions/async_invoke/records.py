"""Records that writers put into the channel for the collector, and their keys. See the package for who writes which."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, TypeAlias

from ephemeron.config.typed import AtLeast, Count, build
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.events import Status, Traffic
from ephemeron.functions.base import Call, Outcome, Reason

_Number: TypeAlias = Annotated[int, AtLeast(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendingRecord:
    """A call is about to be sent: everything that the collector needs to watch it."""

    id: str
    run: str
    rank: int
    attempt: int
    reason: Reason
    memory_mb: int
    lifetime_s: float
    origin: float
    """Same as in `Call`."""
    at: float
    """Unix time."""
    copies: Count = 1
    """Times that it is sent."""
    by: str = ""
    """Invocation that sends it; empty: a client."""
    entry: str = "worker"
    """Same as in `Call`."""

    @classmethod
    def of(cls, id: str, call: Call, *, at: float, copies: int = 1, by: str = "") -> SendingRecord:
        return cls(
            id=id,
            run=call.run,
            rank=call.rank,
            attempt=call.attempt,
            reason=call.reason,
            memory_mb=call.memory_mb,
            lifetime_s=call.lifetime_s,
            origin=call.origin,
            at=round(at, 3),
            copies=copies,
            by=by,
            entry=call.entry,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRecord:
    """The cloud has accepted a call."""

    id: str
    request: str
    """Id that the cloud gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentRecord:
    """The cloud has refused a call."""

    id: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunRecord:
    """A delivery of a call has begun."""

    id: str
    delivery: _Number
    request: str
    stream: str
    """Log stream; empty: none."""
    at: float
    """Unix time."""
    mark: str = ""
    """Random text by which a reporter recognises its own record."""
    billed_by: str = ""
    """Party that measures the bill, if not the cloud."""
    billing_step_s: float = 0.001
    """Multiple of seconds to which a measured bill is rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRecord:
    """A delivery of a call has ended, by its handler."""

    id: str
    delivery: _Number
    status: Status
    error: str
    took_s: float
    peak_mb: float
    burst_vcpu_s: float = 0.0
    """See `Outcome`."""
    value: Mapping[str, object] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    """Traffic of the reporter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledRecord:
    """A call is to end. Made by the collector."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedRecord:
    """The function of a call keeps its memory and does not run."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WokenRecord:
    """The function of a call runs again."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRecord:
    """A delivery has ended, as the collector has decided."""

    id: str
    delivery: _Number
    request: str
    """Empty: it never began."""
    invocation: str
    outcome: Outcome
    billed_by: str
    """See `CallResult`."""


Record: TypeAlias = (
    SendingRecord | SentRecord | UnsentRecord | BegunRecord | OutcomeRecord | CancelledRecord | SuspendedRecord | WokenRecord | FinalRecord
)
_KINDS: Mapping[str, type[Record]] = {
    "sending": SendingRecord,
    "sent": SentRecord,
    "unsent": UnsentRecord,
    "begun": BegunRecord,
    "outcome": OutcomeRecord,
    "cancelled": CancelledRecord,
    "suspended": SuspendedRecord,
    "woken": WokenRecord,
    "final": FinalRecord,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOutcome:
    """End of a delivery, as its handler measures it."""

    status: Status
    error: str = ""
    value: Mapping[str, object] = field(default_factory=dict)
    took_s: float = 0.0
    """Seconds since the handler was called."""
    peak_mb: float = 0.0
    burst_vcpu_s: float = 0.0
    """See `Outcome`."""


@dataclass(frozen=True, slots=True)
class RecordKeys:
    """Keys of the records of one run."""

    calls: str
    """Prefix, which nothing else of the run has."""

    @property
    def all(self) -> str:
        return f"{self.calls}/"

    @property
    def cancel(self) -> str:
        return f"{self.calls}/cancel"

    def payload(self, id: str) -> str:
        return f"{self.calls}/payload.{id}"

    def segment(self, writer: str, delivery: int, number: int) -> str:
        return f"{self.calls}/{writer}/{delivery}/{number:06d}"

    def parse(self, key: str) -> tuple[str, int, int] | None:
        """Writer, delivery and number of a segment; None for other keys."""
        parts = key.removeprefix(self.all).split("/")
        if len(parts) != 3 or not parts[1].isdecimal() or not parts[2].isdecimal():
            return None
        return parts[0], int(parts[1]), int(parts[2])


def calls_prefix(run: str) -> str:
    """Prefix beside `RUN/`, which the run itself clears."""
    return f"{run}.calls"


def new_id(call: Call) -> str:
    """A unique id with rank and attempt: an attempt of a rank may be sent more than once."""
    return f"{call.rank}.{call.attempt}.{secrets.token_hex(4)}"


def invocation_of(id: str, delivery: int) -> str:
    """Name of a delivery: the id of its call, with a number except for the first."""
    return id if delivery == 0 else f"{id}.{delivery}"


def encode(lines: Iterable[str]) -> bytes:
    """One segment of lines."""
    return "\n".join(lines).encode()


def decode(data: memoryview | bytes) -> list[str]:
    """The lines of a segment."""
    return bytes(data).decode().splitlines()


def line_of(record: Record) -> str:
    """A record as one line."""
    return json.dumps({"record": _NAMES[type(record)], **asdict(record)}, separators=(",", ":"))


def record_of(line: str) -> Record | None:
    """The record in a line; None for an event, for a truncated line, and for a record of another version."""
    try:
        value = json.loads(line)
        return parse(value) if isinstance(value, dict) and "record" in value else None
    except (ValueError, CorruptMessage):
        return None


def parse(value: Mapping[str, object]) -> Record:
    """A record from its JSON object.

    Raises:
        CorruptMessage: it is not one.
    """
    kind = _KINDS.get(str(value.get("record")))
    if kind is None:
        raise CorruptMessage(f"no kind of record: {value.get('record')!r}")
    try:
        return build(kind, {k: v for k, v in value.items() if k != "record"}, where=f"record {value['record']}")
    except JobError as e:
        raise CorruptMessage(str(e)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeRequest:
    """The event that a cloud delivers: a call, and how to report about it. No secrets but the run's key."""

    id: str
    run: str
    rank: int
    attempt: int
    calls: str
    """See `RecordKeys`."""
    channel: str
    every_s: float
    """Seconds between two reports."""
    lifetime_s: float
    call: Call | None
    """None: it is stored under `RecordKeys.payload`, signed, without its key."""
    key: str = field(default="", repr=False)
    """Key of a call that is stored."""

    def to_bytes(self) -> bytes:
        return json.dumps({"ephemeron": 1, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_event(cls, event: object) -> InvokeRequest:
        """The inverse.

        Raises:
            CorruptMessage: it is not a call of this package.
        """
        if not isinstance(event, dict) or event.get("ephemeron") != 1:
            raise CorruptMessage("not a call of ephemeron (version 1): this function trains, and is invoked by `train`")
        try:
            return build(cls, {k: v for k, v in event.items() if k != "ephemeron"}, where="a call of ephemeron")
        except JobError as e:
            raise CorruptMessage(str(e)) from None


EVERYTHING = "*"
"""Instead of an id: the run is over, and calls that are still delivered end at once."""


def cancelled_ids(data: memoryview | bytes | None) -> frozenset[str]:
    """The calls that are to end."""
    return frozenset() if data is None else frozenset(json.loads(bytes(data)))


def cancellation(ids: Sequence[str]) -> bytes:
    """The inverse."""
    return json.dumps(sorted(ids)).encode()
