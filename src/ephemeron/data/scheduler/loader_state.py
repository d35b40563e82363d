"""State of a loader in QMOWS, replies to it, and the options. The decisions are in `qmows`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from ephemeron.data.scheduler.tasks import K, LoadTask, TaskFailure
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of QMOWS."""

    window: int = 16
    """K: tasks in a loader's queue. 2 N or more keep a loader busy during a request."""
    batch: int = 4
    """N: results in a request. A loader with fewer tasks than this steals from others."""
    copies: int = 2
    """Loaders that may have the same task at a time."""
    lease_s: float = 10.0
    """A loader without a heartbeat or request for this long is given up."""
    stuck_s: float = 120.0
    """A loader that has work and makes no request for this long is given up, also if it sends heartbeats."""
    unresponsive_s: float = 1.0
    """All work can be stolen from a loader that has some and makes no request for this long."""

    def __post_init__(self) -> None:
        for name in ("window", "batch", "copies"):
            if getattr(self, name) < 1:
                raise JobError(f"{name} = {getattr(self, name)} is below 1", remedy="give 1 or more")
        for name in ("lease_s", "stuck_s", "unresponsive_s"):
            if not getattr(self, name) > 0:
                raise JobError(f"{name} = {getattr(self, name)} is not above 0", remedy="give seconds above 0")


@dataclass(slots=True, eq=False)
class LoaderState(Generic[K]):
    """The tasks of a loader, as far as the scheduler knows."""

    loader: str
    heard_at: float
    asked_at: float
    """Time of its last request, or of the late answer to it."""
    request: int = 0
    """The newest request that was processed."""
    holding: bool = False
    """Whether the answer to that request is held back until there is work."""
    committed: list[K] = field(default_factory=list)
    """The loader's queue in the last reply, including tasks that were stolen or settled since."""
    uncommitted: dict[K, LoadTask[K]] = field(default_factory=dict)
    """Tasks reserved for this loader that are not in its queue."""
    in_hand: set[K] = field(default_factory=set)
    """All tasks that it may be working on or have queued: a superset of `committed`, renewed by each report."""
    load: int = 0
    """Tasks owned, committed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReply(Generic[K]):
    """The reply to a loader."""

    request: int
    tasks: tuple[K, ...] = ()
    """The loader's whole new queue, in order."""
    accepted: tuple[K, ...] = ()
    """Results to keep. All others in the request are dropped: another loader was faster, or they are not needed any more."""
    failures: tuple[TaskFailure[K], ...] = ()
    hold: bool = False
    """Whether there is no work: reply when `idle_loaders` has the loader and `assign` has work for it."""
    rejoin: bool = False
    """Whether it had been given up (its results were used all the same): add it again, and repeat its request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses(Generic[K]):
    """Loaders that were given up, and tasks that failed by that."""

    loaders: tuple[str, ...]
    failures: tuple[TaskFailure[K], ...]
