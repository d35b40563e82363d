"""Waiting for an object: when peers are asked about, and what ends the wait."""

import asyncio

import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.errors import ReplacementsFailed
from ephemeron.functions import simulation
from ephemeron.training.collectives import StalledPeers, wait_for_object

TIMEOUT_S = 10.0


class Waiter:
    """A wait for `key`, and when it asked about whom."""

    def __init__(self, *, grace_s: float = 0.0) -> None:
        self.channel, self.grace_s = MemoryChannel(), grace_s
        self.asked: list[float] = []

    async def stalled(self) -> StalledPeers:
        return StalledPeers(7, [3], ["key"], self.grace_s)

    async def on_timeout(self, stalled: StalledPeers) -> None:
        assert stalled.ranks == [3]
        self.asked.append(asyncio.get_running_loop().time())

    async def wait(self, **more):
        return await wait_for_object(
            self.channel, "key", timeout_s=lambda: TIMEOUT_S, stalled=self.stalled, on_timeout=self.on_timeout, **{"accept": bytes, **more}
        )

    async def put(self, after_s: float, data: bytes = b"data") -> None:
        await asyncio.sleep(after_s)
        await self.channel.put("key", [data])


def run(waiter, *puts, **more):
    async def go():
        began = asyncio.get_running_loop().time()
        tasks = [asyncio.create_task(waiter.put(*put)) for put in puts]
        arrived = await waiter.wait(**more)
        took = asyncio.get_running_loop().time() - began
        await asyncio.gather(*tasks)
        waiter.asked = [round(t - began, 3) for t in waiter.asked]
        return arrived, round(took, 3)

    return simulation.run(go())


def test_an_object_in_time_asks_about_no_peer():
    waiter = Waiter()
    arrived, took = run(waiter, (4.0,))
    assert (arrived.value, arrived.late, took, waiter.asked) == (b"data", False, 4.0, [])


def test_peers_are_asked_about_after_every_timeout():
    waiter = Waiter()
    arrived, took = run(waiter, (25.0,))
    assert (arrived.late, took, waiter.asked) == (True, 25.0, [10.0, 20.0])


def test_the_wait_goes_on_while_a_peer_is_given_more_time():
    waiter = Waiter(grace_s=5.0)
    arrived, took = run(waiter, (11.0,))
    assert (arrived.late, took, waiter.asked) == (True, 11.0, [])


def test_a_peer_is_asked_about_when_its_time_is_over():
    waiter = Waiter(grace_s=5.0)
    _, took = run(waiter, (16.0,))
    assert (took, waiter.asked) == (16.0, [15.0])


def test_an_object_that_does_not_count_is_replaced_or_asked_about():
    def accept(data):
        return bytes(data) if data != b"old" else None

    waiter = Waiter(grace_s=5.0)
    arrived, took = run(waiter, (0.0, b"old"), (16.0, b"new"), accept=accept)
    assert (arrived.value, arrived.late, waiter.asked) == (b"new", True, [15.0])
    assert 16.0 <= took <= 16.5


def test_an_error_names_the_key():
    class Failing(Waiter):
        async def on_timeout(self, stalled):
            raise ReplacementsFailed("no more of them", rank=3, attempt=2, iteration=7)

    with pytest.raises(ReplacementsFailed, match=r"no more of them; .* \(key key\)"):
        run(Failing())
