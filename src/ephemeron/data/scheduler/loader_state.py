"""What QMOWS keeps of a loader, what it answers, and its dials. The decisions are in `qmows`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ephemeron.data.scheduler.tasks import Key, Task, TaskFailure
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """The dials of QMOWS."""

    window: int = 16
    """K: tasks in a loader's queue. 2 N or more keep a loader busy while it asks."""
    batch: int = 4
    """N: results in a request. A loader with fewer tasks than this robs others."""
    copies: int = 2
    """Loaders that may have the same task at a time."""
    lease_s: float = 10.0
    """A loader not heard of for this long is given up."""
    stuck_s: float = 120.0
    """A loader that has work and does not ask for this long is given up, however alive it says it is."""
    unresponsive_s: float = 1.0
    """A loader that has work and does not ask for this long can be robbed of all of it."""

    def __post_init__(self) -> None:
        for name in ("window", "batch", "copies"):
            if getattr(self, name) < 1:
                raise JobError(f"{name} = {getattr(self, name)} leaves nothing to schedule", remedy="give 1 or more")
        for name in ("lease_s", "stuck_s", "unresponsive_s"):
            if not getattr(self, name) > 0:
                raise JobError(f"{name} = {getattr(self, name)} is no time to wait", remedy="give seconds above 0")


@dataclass(slots=True, eq=False)
class LoaderState:
    """What a loader is believed to have."""

    loader: str
    heard_at: float
    asked_at: float
    """Its last request, or the late answer to it."""
    request: int = 0
    """The newest request that was processed."""
    holding: bool = False
    """The answer to that request is held back until there is something to do."""
    committed: list[Key] = field(default_factory=list)
    """The loader's queue as it was last told, also what was stolen or settled since."""
    uncommitted: dict[Key, Task] = field(default_factory=dict)
    """Tasks set aside for this loader that it was not told of, or told to put off."""
    in_hand: set[Key] = field(default_factory=set)
    """Everything it may be working on or have queued: a superset of `committed`, made anew by each report."""
    load: int = 0
    """Tasks owned, committed or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReply:
    """The answer to a loader."""

    request: int
    tasks: tuple[Key, ...] = ()
    """The whole queue it is to have, first things first."""
    accepted: tuple[Key, ...] = ()
    """Results to keep. All others it brought are to be dropped: somebody was faster, or nobody wants them."""
    failures: tuple[TaskFailure, ...] = ()
    hold: bool = False
    """There is nothing to do: answer when `hungry` names the loader and `deal` has something for it."""
    rejoin: bool = False
    """It had been given up (its results were looked at all the same): let it `join` and ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Loaders that were given up, and tasks that were thereby given up as well."""

    loaders: tuple[str, ...]
    failures: tuple[TaskFailure, ...]
