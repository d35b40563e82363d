"""The port of collectives, and what a collective gets from the worker that it serves.

A group of one rank: nothing is sent or copied.

K-REDUCE with one rank gives the same result and keeps three copies of the vector meanwhile, which is too much where a function
holds as much of a model as its memory allows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.events import Phase
from ephemeron.training.collectives.sync_policy import Policy
from ephemeron.training.tensors import Arrays

if TYPE_CHECKING:
    from ephemeron.communication.direct.mesh import Mesh

GRACE_SHARE = 0.2
"""Share of the timeout that a late peer gets once all its inputs have arrived."""


class Trace(Protocol):
    """Record of the time that a collective spends in each phase. Times are loop times."""

    def record(self, phase: Phase, start: float, end: float) -> None: ...

    def run_time(self) -> float:
        """Seconds since the launch of the run."""


class NoTrace:
    """A trace that keeps nothing."""

    def record(self, phase: Phase, start: float, end: float) -> None: ...

    def run_time(self) -> float:
        return 0.0


@dataclass(slots=True)
class ReductionStatus:
    """Progress of a worker, which it reports in every contribution. The worker keeps it current."""

    applied: int = 0
    """Number of versions that its parameters contain."""
    durable: int = 0
    """Number of versions that no replacement of it would need again."""
    intact: int = 0
    """No version from this one on can have been deleted before this invocation."""
    busy_s: float = 0.0
    """Time of the slowest iteration that it knows, without waits."""
    spent_usd: float = 0.0
    """Cost of the rank so far."""


async def _give_up(stalled: StalledPeers) -> None:
    raise TimeoutError(f"iteration {stalled.iteration}: nothing from ranks {list(stalled.ranks)}")


class StalledPeers(NamedTuple):
    """Ranks that a wait is due to, and the iteration of the missing objects."""

    iteration: int
    ranks: Sequence[int]
    keys: Sequence[str] = ()
    """By rank, key of the missing object; empty: not known."""
    grace_s: float = 0.0
    """Seconds that they may still take: objects that they waited for themselves may have arrived only just now."""


@dataclass(slots=True, kw_only=True)
class Group:
    """One worker's membership in a group that reduces vectors together."""

    keys: Keys
    rank: int
    world: int
    aggregators: int
    """K: each rank below it reduces one shard."""
    channel: Channel
    policy: Policy
    size: int
    """Elements of the vectors."""
    dtype: np.dtype[np.generic]
    attempt: int = 0
    mesh: Mesh | None = None
    """Direct connections to the other ranks of the run; None: all goes through the channel."""
    replays: bool = True
    """Whether replacements repeat iterations from a checkpoint, and need the versions since then."""
    members: Sequence[int] = ()
    """By rank, the rank in the run; empty: the same."""
    ranks_per_machine: int = 1
    """Neighbours that share a machine: see `TwoLevelReduce`."""
    shared_cores: int = 0
    """Cores of the machine on which all ranks are; 0: each has its own."""
    compression: str = "none"
    iterations: int = 1 << 40
    """Iterations of the whole run: the last one of an asynchronous run waits for all ranks, as does the last one before a barrier."""
    status: ReductionStatus = field(default_factory=ReductionStatus)
    trace: Trace = field(default_factory=NoTrace)
    poll_worth_s: float = 0.1
    """Seconds of waiting that cost as much as a poll which finds nothing. The default polls rarely; workers derive it
    from prices, and poll more where steps scatter."""
    wait_timeout_s: Callable[[float], float] = lambda times: 60.0 * times
    """Seconds to wait for a peer before `on_timeout` is called; the argument is a multiple of the usual timeout."""
    on_message: Callable[[int, float, float], None] = lambda rank, busy_s, spent_usd: None
    """Called when a new object of a rank has arrived, with the time of the slowest iteration that the rank knows."""
    silence_timeout_s: Callable[[], float] = lambda: 60.0
    """Seconds for which a peer that no rank waits for may be silent."""
    suspect: Callable[[StalledPeers], Awaitable[None]] = _give_up
    """Called when such a peer has been silent for longer: raises to end the run or this invocation, else returns."""
    on_timeout: Callable[[StalledPeers], Awaitable[None]] = _give_up
    """Called when a peer is late: raises to end the wait, returns to go on with it."""

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

    Per iteration a worker calls `submit`, `upload`, then (in the background, in order) `reduce`; it calls
    `wait` for each version that its synchronisation policy lets it apply. All of these are idempotent: a replaced
    worker repeats them with the same arguments.
    """

    overlaps = False
    """`upload`, `reduce` and `wait` of one iteration may run at the same time."""
    self_paced = False
    """Version t is this worker's own: no rank waits for another one."""

    def durable(self) -> int:
        """Number of versions that no rank would need again, as far as this one knows."""
        return 0

    @abstractmethod
    def submit(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        """Registers this rank's contribution to an iteration. Sends nothing.

        Args:
            iteration: number of the iteration.
            vector: the *sum* over `weight` samples, 1-D of `Group.size`. It must not change until `upload` has returned.
            weight: samples that the vector stands for.
            flags: `STOP`, `HAND_OFF` or 0.
        """

    @property
    def early(self) -> Sequence[tuple[int, int]]:
        """Elements `start:stop` of the pieces that `submit_piece` takes while the rest of a vector is computed; none by default."""
        return ()

    def submit_piece(self, iteration: int, number: int, part: np.ndarray, weight: float, flags: int = 0) -> None:
        """Registers a piece of this rank's contribution, and sends it at once. `submit` follows with the whole.

        Args:
            iteration, weight, flags: see `submit`, which gets the same.
            number: of the piece, in `early`.
            part: its elements, which stay in place and are part of the whole vector later.
        """
        raise NotImplementedError

    @abstractmethod
    async def upload(self, iteration: int) -> None:
        """Sends the submitted contribution."""

    @abstractmethod
    async def reduce(self, iteration: int) -> None:
        """Does this rank's share of the reduction, if it has one."""

    @abstractmethod
    async def wait(self, version: int) -> Reduced:
        """Waits until a version is complete and returns it.

        Raises:
            BaseException: from `Group.on_timeout`, when a peer is late.
        """

    async def poll(self, version: int) -> bool:
        """Whether the version is complete; if so, a following `wait` for it returns at once."""
        return False

    async def pending(self, iteration: int) -> tuple[bool, bool]:
        """Whether a replacement still has to upload, and to reduce its share of, an iteration.

        Both True: its predecessor did not reach this point. Repeating an upload is always harmless.
        """
        return True, True

    def take_over(self, iteration: int, *, uploaded: bool) -> None:
        """Accepts the predecessor's finished reduction of a submitted iteration, and its upload if `uploaded`."""

    def acknowledged(self, iteration: int) -> int:
        """Number of iterations, at most `iteration`, of which all objects sent by this rank are known to have arrived."""
        return iteration

    async def latest_iteration(self, rank: int) -> int | None:
        """Latest iteration for which a rank has stored an object; None: this collective cannot tell."""
        return None

    async def first_lost(self, rank: int, iteration: int) -> int | None:
        """First version before `iteration` whose share by this rank was lost, which `rank` may be waiting for; None: none."""
        return None

    async def stalled_before(self, iteration: int, rank: int, key: str) -> StalledPeers:
        """Stalled peers where `rank` has not come to an iteration: it, or those that it waits for.

        Args:
            iteration: that it should be about to compute.
            key: of the object by which this would be known.
        """
        return StalledPeers(iteration, [rank], [key])

    async def collect_garbage(self) -> None:
        """Deletes objects that no rank needs any more."""

    def private_arrays(self) -> Arrays:
        """Copies of the arrays of `state` that no other rank has, where all ranks apply all versions."""
        return {}

    def state(self) -> tuple[Arrays, CollectiveState]:
        """State for a replacement of this rank: arrays, and plain values."""
        return {}, CollectiveState()

    def load(self, arrays: Arrays, state: CollectiveState) -> None:
        """Restores what `state` returned."""

    async def setup(self, initial: np.ndarray) -> None:
        """Publishes the initial parameters where the collective holds them. Called once per invocation."""

    async def final_parameters(self) -> np.ndarray | None:
        """The parameters after the last iteration of all ranks, if this collective holds them."""
        return None


# -- state of a collective, as a checkpoint has it: plain values, for JSON ----------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GarbageState:
    """State of `ObjectGC`."""

    applied: Mapping[int, int] = field(default_factory=dict)
    """By rank, versions applied."""
    durable: Mapping[int, int] = field(default_factory=dict)
    """By rank, versions that no replacement of it needs."""
    contributions: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By version, keys of its contributions."""
    merged: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By version, keys of its merged shards."""


Arrivals = Mapping[str, tuple[float, ...]]
"""State of `ArrivalPredictor`: by stream, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveState:
    """State for a replacement of a rank, beside the arrays."""

    garbage: GarbageState = field(default_factory=GarbageState)
    arrivals: Arrivals = field(default_factory=dict)
    folded: tuple[int, ...] = ()
    """Asynchronous runs: by rank, number of iterations folded into the shard of this rank."""
    read: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Asynchronous runs: by shard, the same after the last version that was applied."""


# -- A group of one rank: nothing is sent or copied ---------------------------------------------------------------


class SingleRank(Collective):
    """See `Collective`. The submitted vector is divided in place.

    Args:
        group: of one rank.
    """

    def __init__(self, group: Group) -> None:
        assert group.world == 1
        self._submitted: dict[int, tuple[np.ndarray, float, int]] = {}

    def submit(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        self._submitted[iteration] = (vector, weight, flags)

    async def upload(self, iteration: int) -> None:
        pass

    async def reduce(self, iteration: int) -> None:
        pass

    async def wait(self, version: int) -> Reduced:
        vector, weight, flags = self._submitted.pop(version)
        if weight > 0:
            vector /= vector.dtype.type(weight)
        return Reduced(vector, flags)
