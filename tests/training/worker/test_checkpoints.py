"""Checkpoints: at least two are kept, the oldest is relied on, and no lost put loses both."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.wrappers import Faulty
from ephemeron.communication.keys import Keys
from ephemeron.errors import ChannelTimeout, CorruptMessage
from ephemeron.training.tensors import encode_state
from ephemeron.training.worker.recovery.checkpoint import Checkpoint, CheckpointMeta, Checkpoints

KEYS = Keys("run")


def checkpoints(channel, rank=1):
    return Checkpoints(channel, KEYS, rank)


async def write(saver, iteration, *, applied=None, forget=True, acknowledged=None):
    arrays = {"w": np.full(3, iteration, dtype=np.float32)}
    applied = iteration if applied is None else applied
    acknowledged = iteration if acknowledged is None else acknowledged
    state = Checkpoint(arrays, {"residual": np.ones(2)}, CheckpointMeta(iteration=iteration, applied=applied))
    nbytes, _ = await saver.write(state, acknowledged=acknowledged)
    if forget:
        await saver.delete_superseded()
    return nbytes


async def iteration_found(channel):
    reader = checkpoints(channel)
    found = await reader.newest()
    if found is None:
        return None
    assert (found.trainer["w"] == found.meta.iteration).all()
    assert found.trainer.keys() == {"w"}
    assert found.collective["residual"].tolist() == [1, 1]
    return found.meta.iteration


def test_two_are_kept_and_durable_lags_by_one():
    async def go():
        channel = MemoryChannel()
        saver = checkpoints(channel)
        assert saver.durable == 0
        durable = []
        for iteration in (10, 20, 30, 40):
            await write(saver, iteration, applied=iteration - 1)
            durable.append(saver.durable)
        assert durable == [0, 9, 19, 29]
        assert set(channel.objects) == {KEYS.state(1, 30), KEYS.state(1, 40)}

    asyncio.run(go())


def test_what_may_have_to_be_sent_again_keeps_a_checkpoint_before_it():
    async def go():
        channel = MemoryChannel()
        saver = checkpoints(channel)
        kept, durable = [], []
        for iteration, acknowledged in ((10, 4), (20, 4), (30, 12), (40, 12), (50, 25), (60, 50)):
            await write(saver, iteration, acknowledged=acknowledged)
            kept.append(sorted(int(key[-9:]) for key in channel.objects))
            durable.append(saver.durable)
        assert durable == [0, 0, 10, 10, 20, 50]  # before iteration 10 there is only the beginning
        assert kept == [[10], [10, 20], [10, 20, 30], [10, 20, 30, 40], [20, 30, 40, 50], [50, 60]]

    asyncio.run(go())


def test_the_third_newest_is_there_until_it_is_forgotten():
    async def go():
        channel = MemoryChannel()
        saver = checkpoints(channel)
        for iteration in (10, 20, 30, 40):
            await write(saver, iteration, forget=False)
        assert set(channel.objects) == {KEYS.state(1, i) for i in (10, 20, 30, 40)}
        assert saver.durable == 30
        await saver.delete_superseded()
        assert set(channel.objects) == {KEYS.state(1, 30), KEYS.state(1, 40)}

    asyncio.run(go())


def test_the_bytes_are_counted():
    async def go():
        channel = MemoryChannel()
        assert await write(checkpoints(channel), 10) == len(channel.objects[KEYS.state(1, 10)])

    asyncio.run(go())


def test_the_newest_is_found_by_number_and_not_by_spelling():
    async def go():
        channel = MemoryChannel()
        saver = checkpoints(channel)
        for iteration in (9, 10, 100):
            await write(saver, iteration)
        assert await iteration_found(channel) == 100
        await channel.delete([KEYS.state(1, 100)])
        assert await iteration_found(channel) == 10

    asyncio.run(go())


def test_none():
    assert asyncio.run(iteration_found(MemoryChannel())) is None


def test_other_ranks_have_their_own():
    async def go():
        channel = MemoryChannel()
        await write(checkpoints(channel, rank=11), 50)
        await write(checkpoints(channel, rank=1), 10)
        assert await iteration_found(channel) == 10

    asyncio.run(go())


@pytest.mark.parametrize("damage", ["cut", "empty", "rubbish", "foreign", "foreign notes", "anonymous"])
def test_a_damaged_newest_one_costs_only_repeated_work(damage):
    async def go():
        channel = MemoryChannel()
        saver = checkpoints(channel)
        await write(saver, 10)
        await write(saver, 20)
        data = channel.objects[KEYS.state(1, 20)]
        channel.objects[KEYS.state(1, 20)] = {
            "cut": data[: len(data) // 2],
            "empty": b"",
            "rubbish": b"\xff" * len(data),
            "foreign": encode_state({"w": np.zeros(3)}, {}),
            "foreign notes": encode_state({"w": np.zeros(3)}, {"saved": 3}),
            "anonymous": encode_state({"w": np.zeros(3)}, {"iteration": 20, "applied": 20}),
        }[damage]
        assert await iteration_found(channel) == 10

    asyncio.run(go())


def test_both_damaged_is_none():
    async def go():
        channel = MemoryChannel()
        saver = checkpoints(channel)
        await write(saver, 10)
        await write(saver, 20)
        for key in channel.objects:
            channel.objects[key] = b"rubbish"
        assert await iteration_found(channel) is None

    asyncio.run(go())


@pytest.mark.parametrize("lost", [10, 20, 30, 40])
def test_whichever_put_is_lost_what_is_found_needs_nothing_that_was_given_up(lost):
    """At every moment: the checkpoint a replacement finds has applied at least what the dead one called durable."""

    async def go():
        channel = MemoryChannel()
        saver = checkpoints(Faulty(channel, drops=lambda key: key == KEYS.state(1, lost)))
        for iteration in (10, 20, 30, 40):
            await write(saver, iteration)
            assert (await iteration_found(channel) or 0) >= saver.durable

    asyncio.run(go())


def test_a_replacement_takes_over_the_bookkeeping():
    async def go():
        channel = MemoryChannel()
        first = checkpoints(channel)
        await write(first, 10)
        await write(first, 20)
        second = checkpoints(channel)
        await second.newest()
        assert second.saved == first.saved
        assert second.durable == 10
        await write(second, 30)
        assert set(channel.objects) == {KEYS.state(1, 20), KEYS.state(1, 30)}

    asyncio.run(go())


def test_writing_the_same_iteration_again_forgets_neither_of_the_two():
    async def go():
        channel = MemoryChannel()
        saver = checkpoints(channel)
        for iteration in (10, 20, 20):
            await write(saver, iteration)
        assert set(channel.objects) == {KEYS.state(1, 10), KEYS.state(1, 20)}
        assert saver.durable == 10

    asyncio.run(go())


def test_reading_a_given_one():
    async def go():
        channel = MemoryChannel()
        saver = checkpoints(channel)
        await write(saver, 10)
        await write(saver, 20)
        reader = checkpoints(channel)
        found = await reader.read(20, deadline=0)
        assert found.meta.iteration == 20
        assert found.trainer["w"].tolist() == [20, 20, 20]
        assert reader.durable == 10
        with pytest.raises(ChannelTimeout, match=r"run/state/1/000000030"):
            await reader.read(30, deadline=0)
        channel.objects[KEYS.state(1, 20)] = b"rubbish"
        with pytest.raises(CorruptMessage, match=r"run/state/1/000000020"):
            await reader.read(20, deadline=0)

    asyncio.run(go())
