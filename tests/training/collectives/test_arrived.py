"""Versions that hold what has arrived: a version that does not continue the chain counts for no rank."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from groups import F32

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.functions.simulation import run
from ephemeron.training.collectives.arrived import ArrivedReduce, Marks
from ephemeron.training.collectives.group import Group, StalledPeers
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.tensors import MessageHeader, codec_by_name, pack, unpack

KEYS, SIZE = Keys("run"), 4


class Superseded(Exception):
    """This attempt has ended."""


def aggregator(channel: MemoryChannel, attempt: int) -> ArrivedReduce:
    async def on_timeout(stalled: StalledPeers) -> None:
        raise Superseded

    group = Group(
        keys=KEYS,
        rank=0,
        world=2,
        aggregators=1,
        channel=channel,
        policy=policy_for("asp"),
        size=SIZE,
        dtype=F32,
        attempt=attempt,
        iterations=10,
        on_timeout=on_timeout,
    )
    return ArrivedReduce(group)


def merged(attempt: int, marks: Marks, value: float) -> list[Any]:
    header = MessageHeader(
        kind="merged",
        rank=0,
        attempt=attempt,
        iteration=0,
        shard=0,
        weight=1.0,
        applied=0,
        durable=0,
        flags=0,
        sent_at=0.0,
        busy_s=0.0,
        marks=marks.numbers,
    )
    vector = np.full(SIZE, value, np.float32)
    return pack(header, [vector], codec=codec_by_name("none"), dtype=F32, elements=SIZE)


async def reduce_first(collective: ArrivedReduce) -> np.ndarray:
    collective.submit(0, np.full(SIZE, 3.0, np.float32), 1.0)
    await collective.upload(0)
    _, reduced = await asyncio.gather(collective.reduce(0), collective.wait(0))
    return reduced.vector


def stored(channel: MemoryChannel, key: str) -> tuple[MessageHeader, np.ndarray]:
    return unpack(memoryview(channel.objects[key]), key=key)


@pytest.mark.parametrize("marks", [Marks((0, 3), (1, 4)), Marks((5, 0), (6, 1))])
def test_a_version_of_an_older_attempt_that_does_not_continue_the_chain_is_replaced(marks: Marks) -> None:
    async def go() -> None:
        channel = MemoryChannel()
        collective = aggregator(channel, attempt=2)
        key = KEYS.merged(0, collective.chunks[0].label)
        await channel.put(key, merged(1, marks, 9.0))
        vector = await reduce_first(collective)
        header, mean = stored(channel, key)
        assert Marks.of(header.marks) == Marks((0, 0), (1, 0))
        assert collective.chain.folded == [1, 0]
        np.testing.assert_array_equal(vector, mean)
        np.testing.assert_array_equal(mean, np.full(SIZE, 3.0 / 2))  # one contribution of two ranks

    run(go())


def test_a_version_of_a_newer_attempt_that_does_not_continue_the_chain_ends_this_one() -> None:
    async def go() -> None:
        channel = MemoryChannel()
        collective = aggregator(channel, attempt=1)
        key = KEYS.merged(0, collective.chunks[0].label)
        await channel.put(key, merged(2, Marks((5, 0), (6, 1)), 9.0))
        with pytest.raises(Superseded):
            await reduce_first(collective)
        assert stored(channel, key)[0].attempt == 2

    run(go())


def test_a_version_of_another_attempt_that_continues_the_chain_is_taken_over() -> None:
    async def go() -> None:
        channel = MemoryChannel()
        collective = aggregator(channel, attempt=1)
        key = KEYS.merged(0, collective.chunks[0].label)
        await channel.put(key, merged(0, Marks((0, 0), (1, 1)), 9.0))
        np.testing.assert_array_equal(await reduce_first(collective), np.full(SIZE, 9.0))
        assert collective.chain.folded == [1, 1]

    run(go())
