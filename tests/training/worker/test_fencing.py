"""Create-only claims: of any number of claimants, one succeeds."""

from __future__ import annotations

import asyncio

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.training.worker.recovery import fencing


def test_exactly_one_of_many_takes_a_key():
    async def go():
        channel = MemoryChannel()
        taken = await asyncio.gather(*(fencing.take(channel, "run/claim/0/1", str(i)) for i in range(50)))
        assert sum(taken) == 1
        assert bytes(await channel.fetch("run/claim/0/1")) == str(taken.index(True)).encode()
        assert not await fencing.take(channel, "run/claim/0/1", "late")
        assert await fencing.take(channel, "run/claim/0/2", "another key")

    asyncio.run(go())


def test_the_latest_attempt_is_the_highest_number_claimed():
    async def go():
        channel, keys = MemoryChannel(), Keys("run")
        assert await fencing.latest_attempt(channel, keys, 2) == 0
        for attempt in range(1, 12):
            await fencing.take(channel, keys.claim(2, attempt), "x")
        await fencing.take(channel, keys.claim(1, 40), "another rank's")
        await fencing.take(channel, keys.claim(22, 40), "another rank's, which begins alike")
        assert await fencing.latest_attempt(channel, keys, 2) == 11
        await channel.delete([keys.claim(2, attempt) for attempt in range(1, 11)])
        assert await fencing.latest_attempt(channel, keys, 2) == 11

    asyncio.run(go())
