"""Virtual time: nothing waits, order is fixed, and a deadlock is said and not waited for."""

from __future__ import annotations

import asyncio
import gc
import random
import time

import pytest

from ephemeron.communication.channels import open_channel
from ephemeron.errors import SimulationDeadlock
from ephemeron.functions.simulation import VirtualTimeLoop, run


def test_years_pass_at_once():
    async def scenario():
        loop = asyncio.get_running_loop()
        assert loop.time() == 0.0
        await asyncio.sleep(3.15e8)
        return loop.time()

    assert run(scenario()) == pytest.approx(3.15e8)


def test_the_clock_stands_still_while_anything_is_ready():
    async def scenario():
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time()

    assert run(scenario()) == 0.0


def test_timers_fire_in_order_and_equal_ones_as_scheduled():
    async def scenario():
        loop = asyncio.get_running_loop()
        seen = []
        dice = random.Random(3)
        for number in range(2000):
            when = float(dice.randrange(20))
            loop.call_at(when, lambda number=number, when=when: seen.append((loop.time(), when, number)))
        await asyncio.sleep(30)
        return seen

    seen = run(scenario())
    assert len(seen) == 2000
    assert all(at == when for at, when, _ in seen)
    assert seen == sorted(seen)


def test_timers_in_the_past_fire_now():
    async def scenario():
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        done = loop.create_future()
        loop.call_at(1.0, done.set_result, None)
        await done
        return loop.time()

    assert run(scenario()) == 5.0


def test_two_runs_are_the_same():
    async def scenario():
        log = []
        dice = random.Random(11)

        async def actor(name):
            for _ in range(50):
                await asyncio.sleep(dice.choice([0, 0.1, 0.1, 0.25, 1]))
                log.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(*(actor(name) for name in range(20)))
        return log

    assert run(scenario()) == run(scenario())


def test_deadlock_is_raised():
    async def scenario():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationDeadlock, match="nothing is scheduled"):
        run(scenario())


def test_cancelled_timers_do_not_advance_the_clock_or_hide_a_deadlock():
    async def scenario():
        loop = asyncio.get_running_loop()
        loop.call_later(100, lambda: None).cancel()
        await asyncio.sleep(1)
        assert loop.time() == 1.0
        await loop.create_future()

    with pytest.raises(SimulationDeadlock):
        run(scenario())


def test_cancelled_timers_do_not_pile_up():
    """Every wait that ends well leaves one behind."""

    async def scenario():
        loop = asyncio.get_running_loop()
        for _ in range(20_000):
            loop.call_later(1e6, lambda: None).cancel()
            await asyncio.sleep(0.001)
        return len(loop._timers)

    assert run(scenario()) < 3000


def test_timeouts_and_cancellation_work():
    async def scenario():
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await asyncio.sleep(3)
        assert loop.time() == 2.0
        task = asyncio.ensure_future(asyncio.sleep(50))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done, waiting = await asyncio.wait([asyncio.ensure_future(asyncio.sleep(s)) for s in (1, 9)], return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(waiting), loop.time()) == (1, 1, 4.0)
        for pending in waiting:
            pending.cancel()

    run(scenario())


def test_failures_come_out_and_leave_garbage_collection_as_it_was():
    before = gc.get_threshold()

    async def scenario():
        assert gc.get_threshold() != before
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(scenario())
    assert gc.get_threshold() == before


def test_it_is_an_ordinary_loop():
    async def scenario():
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        seen = []
        loop.call_soon_threadsafe(seen.append, 1)
        loop.call_soon(seen.append, 2)
        await asyncio.sleep(0)
        handled = []
        loop.set_exception_handler(lambda _, context: handled.append(type(context["exception"])))
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
        assert handled == [ZeroDivisionError]
        return seen

    assert run(scenario()) == [1, 2]


def test_the_clock_stands_still_while_threads_work_for_the_loop():
    """A client that polls would else let hours of virtual time pass, and every lease and lifetime with them."""
    polls = list[float]()

    async def poll():
        while True:
            polls.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.25)

    async def scenario():
        polling = asyncio.create_task(poll())
        await asyncio.sleep(1.1)
        await asyncio.to_thread(time.sleep, 0.05)  # the work
        polling.cancel()

    run(scenario())
    assert polls == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_the_clock_stands_still_while_a_store_answers(tmp_path):
    async def scenario():
        loop = asyncio.get_running_loop()
        passing = asyncio.create_task(asyncio.sleep(900))
        async with open_channel(tmp_path.as_uri()) as channel:
            await asyncio.gather(*(channel.put(f"a/{n}", [b"value"]) for n in range(20)))
            assert len(await channel.list("a/")) == 20
            assert bytes(await channel.fetch("a/7")) == b"value"
            assert not await channel.exists("a/20")
            await channel.delete(["a/7", "a/20"])
        assert (loop.time(), passing.done()) == (0.0, False)

    run(scenario())


def test_what_is_returned_is_not_described():
    """Python does so for each handler of Ctrl-C that it compares; a simulation may return all that has happened in it."""

    class Large:
        def __repr__(self) -> str:
            raise AssertionError("thousands of events")

    async def main() -> Large:
        return Large()

    assert isinstance(run(main()), Large)
