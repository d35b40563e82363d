"""Faults of a store cost time and requests, and are never resolved wrongly. All in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import numpy as np
import pytest

from ephemeron.communication.channels.base import Wrapper
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.communication.channels.retrying import RetryBackoff, RetryPolicy
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.object_frame import FETCHED_AGAIN
from ephemeron.errors import ChannelEmptied, ChannelRefused, ChannelThrottled, ChannelTimeout, ChannelUnreachable, DamagedObject, KeyExists
from ephemeron.functions.simulation import run
from ephemeron.testing.flaky import FAILURES, FlakyChannel, seeded


def failing(times: int, how: str, *operations: str) -> Any:
    """The first requests of these operations fail."""
    left = [times]

    def decide(operation: str, key: str) -> Any:
        if operation not in operations or not left[0]:
            return None
        left[0] -= 1
        return how

    return decide


def opened(store: Any, decide: Any, owner: str = "me", **how: Any) -> RunChannel:
    return RunChannel(FlakyChannel(store, decide), owner=owner, **how)


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


@pytest.mark.parametrize("how", FAILURES)
def test_every_operation_outlives_failures_and_every_request_is_counted(how):
    async def main() -> None:
        everything = ("put", "create", "fetch", "get", "delete", "list", "reduce", "accumulate")
        for operation in everything:
            store = MemoryParameterServer()
            channel = opened(store, failing(6, how, operation))
            await channel.put("r/a", [b"one"])
            await channel.put("r/b", [b"two"], create=True)
            assert bytes((await channel.fetch("r/a")) or b"") == b"one"
            assert bytes((await channel.get("r/b", deadline=later(1))).data) == b"two"
            assert await channel.list("r/") == ["r/a", "r/b"]
            server = channel.reducer()
            assert server is not None
            await server.reduce("r/m", rank=0, world=1, weight=2.0, vector=np.full(3, 4, np.float32))
            total = await server.accumulate("r/w", rank=0, iteration=1, delta=np.ones(3, np.float32))
            again = await server.accumulate("r/w", rank=1, iteration=1, delta=np.ones(3, np.float32))
            assert (total[0], again[0]) == (1, 2)
            await channel.delete(["r/a", "r/b", "r/m", "r/w"])
            assert await channel.list("r/") == []
            t = channel.traffic
            counted = t.puts + t.gets + t.polls + t.lists
            # 5 puts, 4 reads, 2 lists; a create-only put that was served, and did not know it, looked once
            looked = operation == "create" and how == "lost-answer"
            assert counted == 11 + 6 * (operation != "delete") + looked - (looked and 5), operation

    run(main())


def test_a_create_only_put_whose_answer_was_lost_knows_its_own():
    async def main() -> None:
        store = MemoryChannel()
        first = opened(store, failing(1, "lost-answer", "create"), "first")
        await first.put("r/claim", [b"same words"], create=True)
        second = opened(store, failing(3, "lost-answer", "create"), "second")
        with pytest.raises(KeyExists):
            await second.put("r/claim", [b"same words"], create=True)
        with pytest.raises(KeyExists):  # a second put of its own is a put like any other
            await first.put("r/claim", [b"same words"], create=True)

    run(main())


class Torn(MemoryChannel):
    """The first read of a key is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    async def fetch(self, key: str) -> memoryview | None:
        there = await super().fetch(key)
        if there is None or key in self.seen:
            return there
        self.seen.add(key)
        return there[: len(there) // 2]


def test_a_create_only_put_whose_answer_was_lost_knows_its_own_though_it_reads_half_of_it():
    async def main() -> None:
        store = Torn()
        await opened(store, failing(1, "lost-answer", "create"), "first").put("r/claim", [b"same words"], create=True)
        store.seen.clear()
        second = opened(store, failing(1, "lost-answer", "create"), "second")
        with pytest.raises(KeyExists):
            await second.put("r/claim", [b"same words"], create=True)

    run(main())


@pytest.mark.parametrize("seed", range(30))
def test_of_many_that_create_exactly_one_wins_whatever_is_lost(seed):
    async def main() -> None:
        store = MemoryChannel()

        async def creates(rank: int) -> bool:
            channel = opened(store, seeded(f"{seed}/{rank}", rate=0.6), f"rank {rank}")
            try:
                await channel.put("r/claim/0/1", [b"12.000"], create=True)
            except KeyExists:
                return False
            return True

        assert sum(await asyncio.gather(*(creates(rank) for rank in range(8)))) == 1

    run(main())


class Truncating(Wrapper):
    """The first reads of an object are truncated."""

    def __init__(self, inner: Any, key: str, times: float) -> None:
        super().__init__(inner)
        self._key, self._left = key, times

    async def fetch(self, key: str) -> memoryview | None:
        data = await self.inner.fetch(key)
        if data is None or key != self._key or not self._left:
            return data
        self._left -= 1
        return data[: len(data) // 2]


def test_a_stored_object_is_found_though_reads_in_a_row_are_truncated():
    async def main() -> None:
        store = MemoryChannel()
        await RunChannel(store, owner="other").put("r/a", [b"x"])
        found = await RunChannel(Truncating(store, "r/a", FETCHED_AGAIN), owner="me").fetch("r/a")
        assert found is not None
        assert bytes(found) == b"x"
        with pytest.raises(DamagedObject, match=r"key r/a"):
            await RunChannel(Truncating(store, "r/a", FETCHED_AGAIN + 1), owner="me").fetch("r/a")

    run(main())


def test_only_a_store_without_the_specification_has_lost_the_run():
    async def main() -> None:
        store = MemoryChannel()
        await RunChannel(store, owner="client").put("r/spec", [b"{}"])
        channel = RunChannel(Truncating(store, "r/spec", math.inf), owner="me", run="r")
        with pytest.raises(DamagedObject):
            await channel.fetch("r/spec")
        with pytest.raises(ChannelTimeout):
            await channel.get("r/a", deadline=later(1))
        await store.delete(["r/spec"])
        with pytest.raises(ChannelEmptied, match=r"has lost the run's objects.*r/spec"):
            await channel.get("r/a", deadline=later(1))

    run(main())


def test_what_is_refused_fails_at_once():
    async def main() -> None:
        flaky = FlakyChannel(MemoryChannel(), lambda operation, key: "refused")
        channel = RunChannel(flaky, owner="me")
        for attempt in (channel.put("r/a", [b"x"]), channel.fetch("r/a"), channel.list("r/"), channel.delete(["r/a"])):
            with pytest.raises(ChannelRefused):
                await attempt
        assert flaky.requests == 4
        assert asyncio.get_running_loop().time() == 0

    run(main())


@pytest.mark.parametrize(("how", "error"), [("throttled", ChannelThrottled), ("unavailable", ChannelUnreachable)])
@pytest.mark.parametrize("total_s", [0.0, 30.0, 300.0])
def test_a_store_that_is_gone_for_good_is_given_up_in_time(how, error, total_s):
    async def main() -> None:
        flaky = FlakyChannel(MemoryChannel(), lambda operation, key: how)
        channel = RunChannel(flaky, owner="me", retry=RetryPolicy(total_s=total_s))
        with pytest.raises(error, match=f"given up after {'.*'} requests in {total_s:.0f} s.*r/a" if total_s else "r/a"):
            await channel.put("r/a", [b"x"])
        assert asyncio.get_running_loop().time() == pytest.approx(total_s)
        assert channel.traffic.puts == flaky.requests
        assert flaky.requests <= 1 + total_s  # about one in ten seconds, in the end

    run(main())


def test_pauses_grow_scatter_and_are_bounded():
    backoff = RetryBackoff(first_s=0.1, most_s=5.0)
    one, other = random.Random("rank 1"), random.Random("rank 2")
    for tries in range(1, 2000, 7):
        longest = min(5.0, 0.1 * 2.0 ** min(tries - 1, 60))
        drawn = [backoff.pause_s(tries, rng) for rng in (one, other)]
        assert all(longest / 2 <= pause <= longest for pause in drawn)
        assert drawn[0] != drawn[1]


def test_time_without_the_store_is_no_time_of_waiting():
    """The one that is waited for could not put either: it must not be suspected."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = MemoryChannel()

        def down(operation: str, key: str) -> Any:
            return "unavailable" if 2 < loop.time() < 60 else None

        async def sends() -> None:
            await asyncio.sleep(3)
            await opened(store, down, "sender").put("r/a", [b"x"])

        sending = asyncio.create_task(sends())
        reader = opened(store, down, "reader")
        await asyncio.sleep(2.5)
        received = await reader.get("r/a", deadline=later(10))
        assert bytes(received.data) == b"x"
        assert loop.time() < 80
        await sending
        with pytest.raises(ChannelTimeout):  # with the store there, deadlines are what they say
            await reader.get("r/b", deadline=later(10))
        late = opened(store, lambda operation, key: "unavailable" if loop.time() < 300 else None, latest=200.0)
        with pytest.raises(ChannelTimeout):  # and none goes past the end of the function
            await late.get("r/c", deadline=later(10))

    run(main())


def test_long_outages_are_told_once_and_so_is_their_end():
    async def main() -> None:
        loop, heard = asyncio.get_running_loop(), []

        def down(operation: str, key: str) -> Any:
            return "throttled" if loop.time() < 40 or 100 < loop.time() < 103 else None

        channel = opened(MemoryChannel(), down, told=heard.append)
        await asyncio.gather(*(channel.put(f"r/{i}", [b"x"]) for i in range(5)))
        await asyncio.sleep(101 - loop.time())
        await channel.fetch("r/0")
        assert [outage.over for outage in heard] == [False, True]
        assert 5 <= heard[0].seconds < 10
        assert "503" in heard[0].problem
        assert heard[1].seconds >= 40
        assert heard[1].requests > 15

    run(main())
