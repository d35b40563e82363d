"""What voices tell the collector, and under which names. See the package for who tells what."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ephemeron.errors import CorruptMessage
from ephemeron.functions.base import Call

Record: TypeAlias = dict[str, Any]
"""`record` says which kind: sending, sent, unsent, begun, outcome; of the collector's own: report, died, final."""


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

    def segment(self, voice: str, delivery: int, number: int) -> str:
        return f"{self.calls}/{voice}/{delivery}/{number:06d}"

    def parse(self, key: str) -> tuple[str, int, int] | None:
        """Voice, delivery and number of a segment; None for other keys."""
        parts = key.removeprefix(self.all).split("/")
        if len(parts) != 3 or not parts[1].isdecimal() or not parts[2].isdecimal():
            return None
        return parts[0], int(parts[1]), int(parts[2])


def calls_prefix(run: str) -> str:
    """Beside `RUN/`, because that is cleared by the run itself."""
    return f"{run}.calls"


def new_id(call: Call) -> str:
    """Names rank and attempt, and is unique: a rank's attempt may be sent more than once."""
    return f"{call.rank}.{call.attempt}.{secrets.token_hex(4)}"


def invocation_of(id: str, delivery: int) -> str:
    """The name of a delivery: that of its call, and a number for all but the first."""
    return id if delivery == 0 else f"{id}.{delivery}"


def sending(id: str, call: Call, *, at: float, copies: int = 1, by: str = "") -> Record:
    """Before a call is sent: what will be needed to watch it."""
    return {
        "record": "sending", "id": id, "run": call.run, "rank": call.rank, "attempt": call.attempt,
        "reason": call.reason, "memory_mb": call.memory_mb, "lifetime_s": call.lifetime_s,
        "origin": call.origin, "at": round(at, 3),
        "copies": copies, "by": by,
    }  # fmt: skip


def encode(lines: Iterable[str]) -> bytes:
    """One segment of lines."""
    return "\n".join(lines).encode()


def decode(data: memoryview | bytes) -> list[str]:
    """The lines of a segment."""
    return bytes(data).decode().splitlines()


def line_of(record: Record) -> str:
    """A record as one line."""
    return json.dumps(record, separators=(",", ":"))


def record_of(line: str) -> Record | None:
    """The record in a line; None for an event, or for a line that was cut off."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "record" in value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeRequest:
    """The event that a cloud is given: a call, and how to report about it. No secrets."""

    id: str
    run: str
    rank: int
    attempt: int
    calls: str
    channel: str
    every_s: float
    lifetime_s: float
    call: dict[str, Any] | None
    """None: it lies under `RecordKeys.payload`."""

    def to_bytes(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"ephemeron": 1, **fields}, separators=(",", ":")).encode()

    @classmethod
    def from_event(cls, event: Any) -> InvokeRequest:
        """The inverse.

        Raises:
            CorruptMessage: no event of ours.
        """
        if not isinstance(event, dict) or event.get("ephemeron") != 1:
            raise CorruptMessage("not a call of ephemeron (version 1): this function trains, and is invoked by `train`")
        try:
            return cls(**{name: event[name] for name in cls.__slots__})
        except KeyError as e:
            raise CorruptMessage(f"a call of ephemeron without {e}") from None


EVERYTHING = "*"
"""Instead of an id: the run is over, and whatever is still delivered has nothing to do."""


def cancelled_ids(data: memoryview | bytes | None) -> frozenset[str]:
    """The calls that are to end."""
    return frozenset() if data is None else frozenset(json.loads(bytes(data)))


def cancellation(ids: Sequence[str]) -> bytes:
    """The inverse."""
    return json.dumps(sorted(ids)).encode()
