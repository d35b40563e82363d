"""How a vector is cut for K-REDUCE: shards, or chunks of shards, and how many of them are under way at once."""

from __future__ import annotations

from ephemeron.training.tensors import bounds, chunk_bounds
from ephemeron.units import MB

UNDER_WAY_BYTES = 3 * MB
"""Small messages, or chunks, that are on their way at once in each direction: what a link of 70 MB/s moves in 40 ms.
Less leaves the link idle for a latency now and then; more lets chunks of the end queue behind chunks of the start."""


def under_way(message_bytes: int, *, at_least: int) -> int:
    """How many messages of that size may be on their way at once."""
    return max(at_least, UNDER_WAY_BYTES // max(1, message_bytes))


class Chunk:
    """A shard, or a chunk of one: elements `start:stop`, reduced by `owner`."""

    __slots__ = ("index", "label", "owner", "start", "stop")

    def __init__(self, index: int, owner: int, label: str, start: int, stop: int) -> None:
        self.index, self.owner, self.label, self.start, self.stop = index, owner, label, start, stop


def pieces(size: int, aggregators: int, chunk: int | None, rank: int = 0) -> list[Chunk]:
    """All pieces of a vector, in the order in which `rank` sends them.

    First chunks of all shards first, so that every aggregator can begin soon; and each rank begins with another
    shard, so that no aggregator's link gets everything at once while the others' are idle.
    """
    found: list[tuple[int, int, str, int, int]] = []
    for owner, (start, stop) in enumerate(bounds(size, aggregators)):
        if chunk is None:
            found.append((0, owner, str(owner), start, stop))
        else:
            cut = chunk_bounds(start, stop, chunk)
            found += [(c, owner, f"{owner}.{c}", a, b) for c, (a, b) in enumerate(cut)]
    found.sort(key=lambda f: (f[0], (f[1] - rank - 1) % aggregators))
    return [Chunk(i, owner, label, a, b) for i, (_, owner, label, a, b) in enumerate(found)]
