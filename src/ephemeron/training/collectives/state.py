"""State of a collective, as a checkpoint has it: plain values, for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
