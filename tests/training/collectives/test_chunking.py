"""Chunk sizes follow what requests cost."""

import asyncio

import numpy as np
import pytest

from ephemeron.communication.channels.base import Wrapper
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.wrappers import Metered, Throttled
from ephemeron.communication.keys import Keys
from ephemeron.functions import simulation
from ephemeron.training.collectives import Group, collective_for
from ephemeron.training.collectives.chunking import BURST, RequestCost, best_chunk_bytes, measure_requests
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.units import MB


class OneAfterAnother(Wrapper):
    """A store that serves one request at a time."""

    def __init__(self, inner, service_s):
        super().__init__(inner)
        self.turn, self.service_s = asyncio.Lock(), service_s

    async def put(self, key, buffers, *, create=False):
        async with self.turn:
            await asyncio.sleep(self.service_s)
            await super().put(key, buffers, create=create)

    async def fetch(self, key):
        async with self.turn:
            await asyncio.sleep(self.service_s)
            return await super().fetch(key)


def test_a_store_that_answers_at_once_has_no_service_time():
    async def main():
        inner = MemoryChannel()
        cost = await measure_requests(Throttled(inner, latency_s=0.02, bandwidth_mb_s=70), "run/probe")
        return cost, await inner.list("")

    cost, left = simulation.run(main())
    assert cost.latency_s == pytest.approx(0.02, rel=0.02)
    assert cost.service_s < 0.02 / BURST
    assert cost.bandwidth_mb_s == pytest.approx(70, rel=0.05)
    assert not cost.serial
    assert left == []


def test_a_store_that_answers_one_after_another_has_one():
    async def main():
        return await measure_requests(OneAfterAnother(MemoryChannel(), 0.008), "run/probe")

    cost = simulation.run(main())
    assert cost.serial
    assert cost.service_s == pytest.approx(0.008, rel=0.1)


def test_measuring_is_bounded_and_metered():
    async def main():
        channel = Metered(MemoryChannel())
        await measure_requests(channel, "run/probe")
        return channel.traffic

    traffic = simulation.run(main())
    assert traffic.puts + traffic.gets <= 50


FREE = RequestCost(latency_s=0.02, service_s=0.0, bandwidth_mb_s=70)
SERIAL = RequestCost(latency_s=0.008, service_s=0.008, bandwidth_mb_s=250)


@pytest.mark.parametrize(("workers", "aggregators"), [(2, 1), (4, 4), (8, 2)])
def test_free_requests_are_used_and_dear_ones_are_not(workers, aggregators):
    model = int(47 * MB)
    assert best_chunk_bytes(workers, aggregators, model_bytes=model, cost=FREE) == 1 * MB
    assert best_chunk_bytes(workers, aggregators, model_bytes=model, cost=SERIAL) == 0


def test_chunks_grow_with_what_a_request_takes():
    sizes = [
        best_chunk_bytes(8, 8, model_bytes=400 * MB, cost=RequestCost(latency_s=0.02, service_s=s, bandwidth_mb_s=70))
        for s in (0.0, 0.0002, 0.002, 0.1)
    ]
    assert sizes[0] == 1 * MB
    assert sizes[1] < sizes[2]
    assert sizes[-1] == 0


def test_one_worker_has_nothing_to_cut():
    assert best_chunk_bytes(1, 1, model_bytes=400 * MB, cost=FREE) == 0


def test_without_chunks_the_pipelined_form_is_the_plain_one():
    group = Group(
        keys=Keys("run"),
        rank=0,
        world=2,
        aggregators=2,
        channel=MemoryChannel(),
        policy=policy_for("bsp"),
        size=10 * MB,
        dtype=np.dtype(np.float32),
    )
    plain, chunked = collective_for("pipelined", group, chunk_bytes=0), collective_for("pipelined", group)
    assert len(plain.chunks) == 2
    assert not plain.overlaps
    assert len(chunked.chunks) == 40
    assert chunked.overlaps
