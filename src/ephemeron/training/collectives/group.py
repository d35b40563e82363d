"""What a collective needs to know of the worker it serves, and the port it fills."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import ChannelTimeout, ReplacementsFailed
from ephemeron.events import Phase
from ephemeron.training.collectives.sync_policy import Policy

MOMENT = 0.2
"""Share of the patience that whoever is late gets once it has all that it may have waited for."""


class Trace(Protocol):
    """Where a collective reports what it spends its time on. Times are loop times."""

    def record(self, phase: Phase, start: float, end: float) -> None: ...

    def run_time(self) -> float:
        """Now, in seconds of the run."""


class NoTrace:
    """Reports to nobody."""

    def record(self, phase: Phase, start: float, end: float) -> None: ...

    def run_time(self) -> float:
        return 0.0


@dataclass(slots=True)
class ReductionStatus:
    """What a worker says of itself in every contribution; the worker keeps it current."""

    applied: int = 0
    durable: int = 0
    intact: int = 0
    """Versions from this one on cannot have been deleted before this invocation."""
    busy_s: float = 0.0
    """Of the slowest iteration that it knows of, without waits."""


async def _give_up(blame: StalledPeers) -> None:
    raise TimeoutError(f"iteration {blame.iteration}: nothing from ranks {list(blame.ranks)}")


class StalledPeers(NamedTuple):
    """Who keeps us waiting, for which iteration."""

    iteration: int
    ranks: Sequence[int]
    keys: Sequence[str] = ()
    """What is missed of each rank; empty: not known."""


async def ask_for(
    overdue: Callable[[StalledPeers], Awaitable[None]], blame: StalledPeers, missing: ChannelTimeout
) -> None:
    """`overdue`, whose error names the key that is missing, and what was found in its place."""
    try:
        await overdue(blame)
    except ReplacementsFailed as e:
        said = f"{e.problem}; {missing.problem} (key {missing.key})"
        raise ReplacementsFailed(said, rank=e.rank, attempt=e.attempt, iteration=e.iteration) from e


@dataclass(slots=True, kw_only=True)
class Group:
    """One worker's membership in a group that reduces vectors together."""

    keys: Keys
    rank: int
    world: int
    aggregators: int
    """K: ranks below it aggregate one shard each."""
    channel: Channel
    policy: Policy
    size: int
    """Elements of the vectors."""
    dtype: np.dtype[np.generic]
    attempt: int = 0
    compression: str = "none"
    iterations: int = 1 << 40
    """Of the whole run: the last one of an asynchronous run waits for everybody."""
    status: ReductionStatus = field(default_factory=ReductionStatus)
    trace: Trace = field(default_factory=NoTrace)
    poll_worth_s: float = 0.1
    """Seconds of this group's time that a poll which finds nothing is worth. The default polls rarely; workers derive it
    from prices, and poll more where steps scatter."""
    patience_s: Callable[[float], float] = lambda times: 60.0 * times
    """How long to wait for somebody before asking `overdue` what to do; the argument is a multiple of the usual."""
    heard: Callable[[int, float], None] = lambda rank, busy_s: None
    """Told whenever something new from a rank is there, with the slowest iteration that it knows of."""
    timeout_s: Callable[[], float] = lambda: 60.0
    """How long somebody for whom nobody waits may be silent."""
    suspect: Callable[[StalledPeers], Awaitable[None]] = _give_up
    """Called when such a one is silent: raises to end the run or this invocation, else returns."""
    overdue: Callable[[StalledPeers], Awaitable[None]] = _give_up
    """Called when somebody is late: raises to end the wait, returns to go on with it."""

    @property
    def is_aggregator(self) -> bool:
        return self.rank < self.aggregators


class Reduced(NamedTuple):
    """One version: the weighted mean over the contributions folded into it."""

    vector: np.ndarray
    flags: int
    """Union of the contributors' flags."""


class Collective(ABC):
    """Weighted means of vectors over a group, one version per iteration.

    Per iteration a worker calls `stage`, `upload`, then (in the background, in order) `aggregate`; it calls
    `collect` for each version its synchronisation policy lets it apply. Repeating any of these with the same
    arguments is harmless: a replaced worker does.
    """

    overlaps = False
    """`upload`, `aggregate` and `collect` of one iteration may run at the same time."""
    paces_itself = False
    """Version t is this worker's own: nobody waits for anybody."""

    @abstractmethod
    def stage(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        """Takes this rank's contribution: the *sum* over `weight` samples, 1-D of `Group.size`.

        The vector must not change until `upload` has returned.
        """

    @abstractmethod
    async def upload(self, iteration: int) -> None:
        """Sends what was staged."""

    @abstractmethod
    async def aggregate(self, iteration: int) -> None:
        """Does this rank's share of the reduction, if it has one."""

    @abstractmethod
    async def collect(self, version: int) -> Reduced:
        """Waits for a version."""

    async def peek(self, version: int) -> bool:
        """Whether the version is complete; if so, a following `collect` of it is free."""
        return False

    async def left_to_do(self, iteration: int) -> tuple[bool, bool]:
        """For a replaced worker: whether it still has to upload, and to aggregate, its share of an iteration.

        Both True: its predecessor had not come so far. Uploading again is always harmless.
        """
        return True, True

    def adopt(self, iteration: int, *, uploaded: bool) -> None:
        """Takes a predecessor's work for one's own, after `stage`: it had aggregated, and `uploaded` if so."""

    def acknowledged(self, iteration: int) -> int:
        """Iterations before `iteration` of which everything that this rank sends is known to have arrived."""
        return iteration

    async def latest(self, rank: int) -> int | None:
        """Latest iteration of which something was heard of a rank; None: nobody goes on without it."""
        return None

    async def lost(self, rank: int, iteration: int) -> int | None:
        """First version before `iteration` of which this rank's share was lost, so that another rank may wait for it; None: none."""
        return None

    async def tidy(self) -> None:
        """Deletes what nobody needs any more."""

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """What a replacement of this rank has to know: arrays, and what JSON can hold."""
        return {}, {}

    def load(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """The inverse of `state`."""

    async def setup(self, initial: np.ndarray) -> None:
        """Once per function, before the first iteration."""

    async def final(self) -> np.ndarray | None:
        """The parameters after everybody has finished, if this collective holds them."""
        return None
