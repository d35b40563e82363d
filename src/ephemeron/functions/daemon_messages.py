"""Settings of the local daemon, its requests and its replies, as client and daemon exchange them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ephemeron.config.typed import Count, NonNegative
from ephemeron.functions.base import Call, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """Argument of the daemon's process."""

    folder: Path
    """Folder of the run."""
    limits: Limits
    """Calls beyond them are refused."""
    idle_s: NonNegative = 30.0
    """Time for which a warm process is kept."""
    linger_s: NonNegative = 2.0
    """Time for which the daemon stays without clients and functions."""
    enforce: bool = True
    """Control groups enforce quotas, where this machine has them."""
    forks: bool = True
    """Function processes are forked, where this system can do it."""
    spare: bool = False
    """While functions run, one process of their quota is kept ready for a successor or a replacement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionsWanted:
    """Function processes that an early daemon is to start before it has a run."""

    memory_mb: Count
    """Their quota."""
    count: Count
    limits: Limits
    """Of the machine: CPU shares follow from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRequest:
    """A line to an early daemon. Exactly one of the two is given."""

    functions: FunctionsWanted | None = None
    run: DaemonSettings | None = None
    """Its run: the last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonAddress:
    """Content of `host.json`: how clients of the same user reach the daemon."""

    pid: int
    socket: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenParams:
    """Parameters of `open`: a further run whose functions the daemon hosts."""

    run: str
    """Name of the run in calls."""
    folder: Path
    """Folder of the run."""
    env: Mapping[str, str]
    """Environment variables of its functions; never written to disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParams:
    """Parameters of `status`, `cancel_all` and `leave`: one of the runs that the daemon hosts."""

    folder: Path
    """Folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvokeParams:
    """Parameters of `invoke`."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationParams:
    """Parameters of `wait` and `cancel`, and the reply to `invoke`."""

    invocation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """Reply to `status`."""

    pid: int
    folder: Path
    """The daemon's own folder: that of its run, or of a session."""
    limits: Limits
    enforcement: str
    """`Enforcement.kind`."""
    unenforced: tuple[str, ...]
    """See `Platform.unenforced`."""
    running: Mapping[str, int]
    """Process of each running invocation of the run; 0: not started yet."""
    warm: int
    """Idle processes."""
    fork_servers: tuple[int, ...]
    """Processes that functions are forked from."""
    problem: str
    """Why events cannot be written; empty: they can."""
