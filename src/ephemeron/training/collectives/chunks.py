"""Division of a vector for K-REDUCE: shards, or chunks of shards, and how many of them are in flight at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ephemeron.training.tensors import MessageHeader, bounds, chunk_bounds
from ephemeron.units import MB

IN_FLIGHT_BYTES = 3 * MB
"""Bytes of small messages, or chunks, in flight at once in each direction: what a link of 70 MB/s moves in 40 ms.
Less leaves the link idle for a latency now and then; more lets chunks of the end queue behind chunks of the start."""


def in_flight(message_bytes: int, *, at_least: int) -> int:
    """Number of messages of that size that may be in flight at once."""
    return max(at_least, IN_FLIGHT_BYTES // max(1, message_bytes))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A shard, or a chunk of one: elements `start:stop`."""

    index: int
    """Number among all chunks, in the order in which this rank sends them."""
    owner: int
    """Rank that reduces it."""
    label: str
    """Name in keys: shard, or shard and number within the shard."""
    start: int
    stop: int


class ChunkSum:
    """Sum of one chunk's contributions."""

    def __init__(self) -> None:
        self.vector: np.ndarray | None = None
        self.weight = 0.0
        self.flags = 0

    def add(self, part: np.ndarray, header: MessageHeader) -> None:
        """Adds one contribution."""
        if self.vector is None:
            self.vector = np.array(part)
        else:
            self.vector += part
        self.weight += header.weight
        self.flags |= header.flags

    def mean(self) -> np.ndarray:
        """Mean over all samples, in place; the sum itself if there are none."""
        assert self.vector is not None
        if self.weight > 0:
            self.vector /= self.vector.dtype.type(self.weight)
        return self.vector


def chunks(size: int, aggregators: int, chunk_size: int | None, rank: int = 0) -> list[Chunk]:
    """All chunks of a vector, in the order in which `rank` sends them.

    The first chunks of all shards come first, so that every aggregator can begin soon; and each rank begins with another
    shard, so that no aggregator's link gets everything at once while the others' are idle.

    Args:
        size: elements of the vector.
        aggregators: number of shards.
        chunk_size: elements per chunk; None: shards are not divided.
        rank: the sender.
    """
    found: list[tuple[int, int, str, int, int]] = []
    for owner, (start, stop) in enumerate(bounds(size, aggregators)):
        if chunk_size is None:
            found.append((0, owner, str(owner), start, stop))
        else:
            cut = chunk_bounds(start, stop, chunk_size)
            found += [(c, owner, f"{owner}.{c}", a, b) for c, (a, b) in enumerate(cut)]
    found.sort(key=lambda f: (f[0], (f[1] - rank - 1) % aggregators))
    return [Chunk(i, owner, label, a, b) for i, (_, owner, label, a, b) in enumerate(found)]
