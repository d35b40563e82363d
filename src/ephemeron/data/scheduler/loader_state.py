"""State that QMOWS keeps of a loader, its replies and its options. The decisions are in `qmows`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ephemeron.data.scheduler.tasks import Key, Task, TaskFailure
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
    """Time without a message after which a loader is given up."""
    stuck_s: float = 120.0
    """Time without a request after which a loader that has work is given up, even if it sends heartbeats."""
    unresponsive_s: float = 1.0
    """Time without a request after which all tasks of a loader that has work can be stolen."""

    def __post_init__(self) -> None:
        for name in ("window", "batch", "copies"):
            if getattr(self, name) < 1:
                raise JobError(f"{name} = {getattr(self, name)} leaves nothing to schedule", remedy="give 1 or more")
        for name in ("lease_s", "stuck_s", "unresponsive_s"):
            if not getattr(self, name) > 0:
                raise JobError(f"{name} = {getattr(self, name)} is no time to wait", remedy="give seconds above 0")


@dataclass(slots=True, eq=False)
class LoaderState:
    """The scheduler's view of a loader."""

    loader: str
    heard_at: float
    asked_at: float
    """Time of its last request, or of the late answer to it."""
    request: int = 0
    """The newest request that was processed."""
    holding: bool = False
    """The answer to that request is held back until there is something to do."""
    committed: list[Key] = field(default_factory=list)
    """The loader's queue as of the last reply, including tasks stolen or settled since."""
    uncommitted: dict[Key, Task] = field(default_factory=dict)
    """Tasks reserved for this loader that it was not told of, or was told to postpone."""
    in_hand: set[Key] = field(default_factory=set)
    """Every task that it may be loading or have queued: a superset of `committed`, rebuilt from each report."""
    load: int = 0
    """Tasks owned, committed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReply:
    """Reply to a loader."""

    request: int
    tasks: tuple[Key, ...] = ()
    """The loader's whole new queue, in order."""
    accepted: tuple[Key, ...] = ()
    """Results to keep. The service drops its other results: another loader was faster, or they are no longer wanted."""
    failures: tuple[TaskFailure, ...] = ()
    hold: bool = False
    """No work: the answer is due when `idle_loaders` names the loader and `assign` has a task for it."""
    rejoin: bool = False
    """The loader had been given up (its results were processed all the same): it calls `add_loader` and asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Loaders that were given up, and the tasks that failed with them."""

    loaders: tuple[str, ...]
    failures: tuple[TaskFailure, ...]
