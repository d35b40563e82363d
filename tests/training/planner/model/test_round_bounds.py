"""Round bounds against rounds in virtual time: never faster, and hardly slower."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.wrappers import Throttled
from ephemeron.communication.keys import Keys
from ephemeron.functions.simulation import run
from ephemeron.training.collectives import Group, collective_for
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.planner.model import round_bound_s
from ephemeron.units import MB

SHAPES = [(w, k) for w in (2, 3, 4, 8) for k in range(1, w + 1) if w < 8 or k in (1, 2, 4, 7, 8)]


def round_s(world: int, aggregators: int, size_mb: float, pattern: str, latency_s: float, bandwidth_mb_s: float) -> float:
    """One round of workers that start together."""
    size = int(size_mb * MB) // 4

    async def worker(rank: int, store: MemoryChannel) -> None:
        channel = Throttled(store, latency_s=latency_s, bandwidth_mb_s=bandwidth_mb_s)
        group = Group(
            keys=Keys("r"),
            rank=rank,
            world=world,
            aggregators=aggregators,
            channel=channel,
            policy=policy_for("bsp"),
            size=size,
            dtype=np.dtype(np.float32),
        )
        collective = collective_for(pattern, group)
        collective.submit(0, np.zeros(size, np.float32), 1.0)
        if collective.overlaps:
            await asyncio.gather(collective.upload(0), collective.reduce(0), collective.wait(0))
        else:
            await collective.upload(0)
            await asyncio.gather(collective.reduce(0), collective.wait(0))

    async def everybody() -> float:
        store = MemoryChannel()
        await asyncio.gather(*(worker(rank, store) for rank in range(world)))
        return asyncio.get_running_loop().time()

    return run(everybody())


def bound_s(world: int, aggregators: int, size_mb: float, pattern: str, latency_s: float, bandwidth_mb_s: float) -> float:
    return round_bound_s(
        world, aggregators, model_bytes=size_mb * MB, latency_s=latency_s, bandwidth_mb_s=bandwidth_mb_s, pipelined=pattern == "pipelined"
    )


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["k-reduce", "pipelined"])
@pytest.mark.parametrize(("latency_s", "bandwidth_mb_s"), [(0.01, 70.0), (0.0, 70.0), (0.1, 1000.0), (0.002, 5.0)])
@pytest.mark.parametrize("size_mb", [0.01, 6.0])
def test_never_faster_than_the_bound(pattern, latency_s, bandwidth_mb_s, size_mb):
    for world, aggregators in SHAPES:
        case = (world, aggregators, size_mb, pattern, latency_s, bandwidth_mb_s)
        assert round_s(*case) >= bound_s(*case) * (1 - 1e-9), case


@pytest.mark.slow
@pytest.mark.parametrize(("world", "aggregators"), SHAPES)
def test_plain_rounds_reach_the_bound(world, aggregators):
    """At 5 MB and at 15 MB, at 70 MB/s and 10 ms: within a twentieth, headers and all."""
    for size_mb in (5.0, 15.0):
        case = (world, aggregators, size_mb, "k-reduce", 0.01, 70.0)
        assert round_s(*case) <= 1.05 * bound_s(*case), case


@pytest.mark.slow
@pytest.mark.parametrize(("world", "aggregators"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4)])
def test_pipelined_rounds_come_near_it(world, aggregators):
    """Filling and draining the pipeline costs a few chunks."""
    case = (world, aggregators, 47.0, "pipelined", 0.01, 70.0)
    assert round_s(*case) <= 1.10 * bound_s(*case)
    plain = (world, aggregators, 47.0, "k-reduce", 0.01, 70.0)
    assert round_s(*case) < 0.75 * round_s(*plain)


def test_alone_there_is_nothing_to_exchange():
    assert round_bound_s(1, 1, model_bytes=1e9, latency_s=1, bandwidth_mb_s=1) == 0.0


def test_known_values():
    """By hand, for S = 1 s and no latency: upload, gather, publish and download of an aggregator."""

    def plain(w, k):
        return round_bound_s(w, k, model_bytes=70e6, latency_s=0, bandwidth_mb_s=70)

    def pipelined(w, k):
        return round_bound_s(w, k, model_bytes=70e6, latency_s=0, bandwidth_mb_s=70, pipelined=True)

    assert plain(4, 4) == pytest.approx(0.75 + 0.75 + 0.25 + 0.75)
    assert plain(4, 1) == pytest.approx(1 + 3 + 1 + 1)
    assert plain(4, 2) == pytest.approx(0.5 + 1.5 + 0.5 + 1)
    assert pipelined(4, 4) == pytest.approx(1.5)
    assert pipelined(4, 1) == pytest.approx(3)
    assert pipelined(2, 1) == pytest.approx(1)
