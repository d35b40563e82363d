"""Chunk size of the pipelined form, from what requests cost at the store.

Small chunks let upload, reduction and download overlap, but each of them is a request. A cloud's object store answers
any number of requests at once, so that a chunk costs a latency that overlaps with others. A small server answers one after
another: a hundred chunks are a hundred times its service time, and the plain form is faster. `measure_requests` tells
these apart by requests sent alone and in a burst, and `best_chunk_bytes` takes the size with the least predicted round, or none.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from dataclasses import dataclass

from ephemeron.communication.channels.base import Channel
from ephemeron.training.planner.model import round_bound_s
from ephemeron.units import MB

CHUNK_BYTES = 1 * MB
"""Smallest chunk: its latency is a small part of its transfer on links of some 70 MB/s."""
MOST_DOUBLINGS = 6
BURST = 16
"""Concurrent requests that show whether a store answers them together."""
ALONE = 3
SERIAL = 4
"""Requests that a store must be able to answer at once to count as concurrent."""
_SMALL, _LARGE = 1 * MB // 1000, 4 * MB


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """Duration of requests at a store."""

    latency_s: float
    """Latency of a single small request."""
    service_s: float
    """Least time of the store itself for each of many concurrent requests."""
    bandwidth_mb_s: float
    """MB (1e6 bytes) per second of one large transfer."""

    @property
    def serial(self) -> bool:
        """Whether the store answers few requests at once: the transfers of all ranks then share its bandwidth."""
        return self.service_s > self.latency_s / SERIAL


def chunk_elements(size: int, aggregators: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Elements per chunk: about `chunk_bytes`, but at least two chunks per shard."""
    shard = -(-size // aggregators)
    return max(1, min(chunk_bytes // itemsize, -(-shard // 2)))


def best_chunk_bytes(workers: int, aggregators: int, *, model_bytes: int, cost: RequestCost) -> int:
    """Bytes per chunk with the least predicted round; 0 where the plain form is faster.

    Predicted: the lower bound of the form (`performance.round_bound_s`) or, at a store that answers one after another, the
    transfer of all bytes if that takes longer; one more chunk's transfer for what cannot overlap; and the store's service
    time for every request of the round.

    Args:
        workers, aggregators: W and K.
        model_bytes: bytes of the exchanged vector.
        cost: measured durations of requests.
    """
    if workers == 1:
        return 0
    shard = model_bytes / aggregators

    sent = 2 * aggregators * (workers - 1) + aggregators * workers  # FasDL, equations 3-24 and 3-25
    transfer_s = shard / (cost.bandwidth_mb_s * MB)

    def predicted(chunks: int) -> float:
        bound_s = round_bound_s(
            workers,
            aggregators,
            model_bytes=model_bytes,
            latency_s=cost.latency_s,
            bandwidth_mb_s=cost.bandwidth_mb_s,
            pipelined=chunks > 1,
        )
        if cost.serial:
            bound_s = max(bound_s, sent * transfer_s)
        return bound_s + (transfer_s / chunks if chunks > 1 else 0.0) + chunks * sent * cost.service_s

    sizes = {max(2, math.ceil(shard / (CHUNK_BYTES << n))): CHUNK_BYTES << n for n in reversed(range(MOST_DOUBLINGS))}
    best = min((1, *sizes), key=predicted)
    return 0 if best == 1 else sizes[best]


async def measure_requests(channel: Channel, prefix: str) -> RequestCost:
    """Latency, service time and bandwidth of a store: some 40 requests; their objects are deleted again.

    Args:
        channel: the store.
        prefix: below which the objects are put.

    Raises:
        ChannelUnreachable: the store does not answer.
    """
    loop = asyncio.get_running_loop()
    keys = [f"{prefix}/{n}" for n in range(BURST)]
    small, large = bytes(_SMALL), bytes(_LARGE)

    async def one(key: str, data: bytes) -> float:
        began = loop.time()
        await channel.put(key, [data])
        await channel.fetch(key)
        return (loop.time() - began) / 2

    try:
        await one(keys[0], small)  # opens the connection
        latency_s = statistics.median([await one(keys[0], small) for _ in range(ALONE)])
        began = loop.time()
        await asyncio.gather(*(one(key, small) for key in keys))
        burst_s = (loop.time() - began) / 2
        transfer_s = min([await one(keys[0], large) for _ in range(2)]) - latency_s
    finally:
        await channel.delete(keys)
    # A burst over a store that answers all at once takes one latency; what it takes longer is service, one by one.
    service_s = max(0.0, burst_s - latency_s) / (BURST - 1)
    return RequestCost(latency_s=latency_s, service_s=service_s, bandwidth_mb_s=_LARGE / MB / max(transfer_s, 1e-3))
