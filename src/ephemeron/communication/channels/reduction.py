"""Channels that can add: the arithmetic of parameter servers.

With a store, W workers that average their gradients read each other's vectors (W reads of everything); with a
server that adds, each sends one and reads one. `SupportsReduction` declares the operation, `LocalReduction` is its
arithmetic, without I/O, so that a live server and the simulator give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector: TypeAlias = NDArray[np.floating[Any]]
else:
    Vector = Any  # every channel imports this, and few need NumPy

_REMEMBERED = 100_000


class SupportsReduction(ABC):
    """A channel that averages and accumulates vectors. Found with `isinstance`."""

    @abstractmethod
    async def reduce(self, key: str, *, rank: int, world: int, weight: float, vector: Vector) -> None:
        """Contributes to the mean that appears under `key` once all ranks have contributed.

        The mean is `sum(vector_r) / sum(weight_r)`, or the sum itself where all weights are 0, in the vectors' dtype and added strictly by rank, so it does
        not depend on who came first. It is an ordinary object: `get` waits for it, `delete` removes it. Since the channel
        makes it, the channel frames it (`channels.frame`).
        A key is reduced once: contributing again, before or after the mean is there or deleted, is ignored.

        Args:
            key: the same for all ranks.
            rank: 0 to world - 1.
            world: how many contributions make it complete.
            weight: of this contribution, at least 0; usually its number of samples.
            vector: 1-D floats, already multiplied by `weight`; free to change after the call.

        Raises:
            ChannelError: shape, dtype or world differ from what the others sent.
            ChannelUnreachable: the server does not answer.
        """

    @abstractmethod
    async def accumulate(self, key: str, *, rank: int, iteration: int, delta: Vector) -> Vector:
        """Adds `delta` to the vector at `key` and returns the sum, with the contributions of others so far.

        The vector starts as what `put` stored there (framed, as it is again after each sum), or as zeros. Each rank's iterations must grow: one that is
        not above the rank's last is taken for a repeat, and changes nothing.

        Raises:
            ChannelError: shape or dtype differ from the stored vector.
            ChannelUnreachable: the server does not answer.
        """

    @abstractmethod
    async def heard(self, key: str) -> dict[int, int]:
        """Ranks that have contributed to the sum at `key`, each with its latest iteration; 0 where a mean is not complete.

        Empty when no rank has, or the mean is complete. For ranks whose wait has timed out.

        Raises:
            ChannelUnreachable: the server does not answer.
        """


@dataclass(slots=True)
class _Round:
    world: int
    total: Vector | None = None
    weight: float = 0.0
    next_rank: int = 0
    held: dict[int, tuple[float, Vector]] = field(default_factory=dict)


class LocalReduction:
    """Reductions as a pure state machine: contributions in, finished vectors out.

    Holds one sum and the vectors that came too early for each unfinished mean, and nothing but the key of a
    finished one.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, _Round] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._marks: dict[str, dict[int, int]] = {}

    @property
    def open_rounds(self) -> int:
        """Means that still miss a contribution."""
        return len(self._rounds)

    def reduce(self, key: str, *, rank: int, world: int, weight: float, vector: Vector, owned: bool = False) -> Vector | None:
        """Takes one contribution; returns the mean if it was the last one.

        Args:
            key: see `SupportsReduction.reduce`, as for the others.
            rank: see there.
            world: see there.
            weight: see there.
            vector: see there.
            owned: the vector may be kept and written to.

        Raises:
            ValueError: the contribution does not fit the others.
        """
        if key in self._finished:
            return None
        state = self._rounds.get(key) or _Round(world)
        _check(state, rank, world, weight, vector)
        if rank < state.next_rank or rank in state.held:
            return None
        self._rounds[key] = state
        state.held[rank] = (weight, vector if owned and vector.flags.writeable else vector.copy())
        _add_in_order(state)
        if state.next_rank < world:
            return None
        del self._rounds[key]
        self._remember(key)
        assert state.total is not None
        if state.weight > 0:
            state.total /= state.total.dtype.type(state.weight)
        return state.total

    def accumulate(self, key: str, current: Vector | None, *, rank: int, iteration: int, delta: Vector) -> Vector:
        """The vector at `key` after this delta: a new one, or `current` itself if the delta is a repeat.

        Raises:
            ValueError: the delta does not fit `current`.
        """
        if current is not None and current.shape != delta.shape:
            raise ValueError(f"a delta of {delta.size} numbers for a vector of {current.size}")
        marks = self._marks.setdefault(key, {})
        if iteration <= marks.get(rank, -1):
            import numpy as np

            return np.zeros_like(delta) if current is None else current
        marks[rank] = iteration
        return delta.copy() if current is None else current + delta

    def heard(self, key: str) -> dict[int, int]:
        """See `SupportsReduction.heard`."""
        if key in self._rounds:
            state = self._rounds[key]
            return dict.fromkeys((*range(state.next_rank), *state.held), 0)
        return dict(self._marks.get(key, {}))

    def forget(self, key: str) -> None:
        """The object at `key` was deleted: drops unfinished sums and the marks of `accumulate`."""
        self._rounds.pop(key, None)
        self._marks.pop(key, None)

    def _remember(self, key: str) -> None:
        self._finished[key] = None
        if len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)


def _check(state: _Round, rank: int, world: int, weight: float, vector: Vector) -> None:
    if world != state.world or not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world} does not belong to a reduction of {state.world}")
    if not 0 <= weight < float("inf"):
        raise ValueError(f"a weight of {weight}")
    known = state.total if state.total is not None else next((v for _, v in state.held.values()), vector)
    if vector.ndim != 1 or vector.shape != known.shape or vector.dtype != known.dtype:
        raise ValueError(f"{vector.dtype}{list(vector.shape)} does not fit {known.dtype}{list(known.shape)}")


def _add_in_order(state: _Round) -> None:
    while (part := state.held.pop(state.next_rank, None)) is not None:
        weight, vector = part
        if state.total is None:
            state.total = vector
        else:
            state.total += vector
        state.weight += weight
        state.next_rank += 1
