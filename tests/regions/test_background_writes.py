"""Writes in the background: what is stored is a beginning of what was done."""

from __future__ import annotations

import asyncio

import pytest

from ephemeron.errors import ChannelUnreachable
from ephemeron.regions.own_updates import BackgroundWrites


def test_writes_follow_each_other_and_none_follows_one_that_has_failed() -> None:
    async def go() -> None:
        writes, done, gates = BackgroundWrites(), [], [asyncio.Event() for _ in range(4)]

        def write(number: int) -> None:
            async def one() -> None:
                await gates[number].wait()
                if number == 2:
                    raise ChannelUnreachable("no answer")
                done.append(number)

            writes.add(one)

        for number in range(4):
            write(number)
        gates[1].set()
        gates[3].set()
        waiting = [asyncio.create_task(writes.settle(but=2)) for _ in range(2)]
        await asyncio.sleep(0)
        assert done == []
        gates[0].set()
        await asyncio.gather(*waiting)
        assert done == [0, 1]
        gates[2].set()
        for _ in range(2):  # as often as it is asked
            with pytest.raises(ChannelUnreachable):
                await writes.settle()
        assert done == [0, 1]
        writes.cancel()

    asyncio.run(go())
