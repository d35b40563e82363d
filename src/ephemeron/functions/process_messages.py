"""Messages between a host and its function processes: one line of JSON each, over an inherited socket.

    host         Start, InvokeMessage, SuccessorAccepted, SuccessorRefused
    function     Ready or StartFailed after Start; Running, EventMessage and InvokeSuccessor during an invocation;
                 Returned or Raised at its end

A line is the fields of a dataclass, with its class's name under `message`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TypeAlias, TypeVar

from ephemeron.config.typed import build
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.functions.base import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The process is under its memory quota: it may import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeMessage:
    """One invocation."""

    call: Call
    invocation: str
    """Its id."""
    origin: float
    """Unix time of the run's t = 0."""
    lifetime_s: float
    """Time limit of the handler."""
    vcpus: float
    scratch: str
    """Empty folder of the invocation."""
    base: str
    """Folder that the channel address `folder` means."""
    cold: bool
    """No invocation has run in the process."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of this invocation only: secrets that did not exist when the process was started."""
    log: str | None = None
    """File for what the code prints; None: the log of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessorAccepted:
    """Answer to an `InvokeSuccessor`: the other function is started."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessorRefused:
    """Answer to an `InvokeSuccessor`: no function was started."""

    number: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Imports are done."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """An import raised; the process ends."""

    error: str
    """Type and text, in one line."""
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The handler begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventMessage:
    """An event of the invocation."""

    line: str
    """The event as JSON (`events.to_json`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeSuccessor:
    """The code asks for another function."""

    number: int
    """For the answer."""
    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The code has returned."""

    value: Mapping[str, object]
    reusable: bool
    """Nothing of the invocation is left in the process: it may serve another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The code has raised, or returned what is not a JSON object."""

    error: str
    """Type and text, in one line."""
    traceback: str
    reusable: bool


HostMessage: TypeAlias = Start | InvokeMessage | SuccessorAccepted | SuccessorRefused
FunctionMessage: TypeAlias = Ready | StartFailed | Running | EventMessage | InvokeSuccessor | Returned | Raised
InvocationReply: TypeAlias = StartFailed | Returned | Raised
"""Last message of an invocation, or of a process that has not come so far."""

T = TypeVar("T")

_HOST: Mapping[str, type[HostMessage]] = {kind.__name__: kind for kind in (Start, InvokeMessage, SuccessorAccepted, SuccessorRefused)}
_FUNCTION: Mapping[str, type[FunctionMessage]] = {
    kind.__name__: kind for kind in (Ready, StartFailed, Running, EventMessage, InvokeSuccessor, Returned, Raised)
}


def encode(message: HostMessage | FunctionMessage) -> bytes:
    """A message as one line.

    Raises:
        TypeError, ValueError: a value is not JSON.
    """
    return json.dumps({"message": type(message).__name__, **asdict(message)}, separators=(",", ":")).encode() + b"\n"


def host_message(line: bytes) -> HostMessage:
    """A line of the host.

    Raises:
        CorruptMessage: it is not one of its messages.
    """
    return _read(_HOST, line)


def function_message(line: bytes) -> FunctionMessage:
    """A line of a function process.

    Raises:
        CorruptMessage: it is not one of its messages.
    """
    return _read(_FUNCTION, line)


def _read(kinds: Mapping[str, type[T]], line: bytes) -> T:
    try:
        value = json.loads(line)
        kind = kinds[value.pop("message")]
        return build(kind, value, where=kind.__name__)
    except (ValueError, KeyError, TypeError, AttributeError, JobError) as e:
        raise CorruptMessage(f"not a message of a function process: {type(e).__name__}: {e}") from None
