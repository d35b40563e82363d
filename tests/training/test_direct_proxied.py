"""Whole runs over TCP with a proxy between every two functions: half-open connections, resets, slow links, pairs that are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from training_runs import configuration, make_job

from ephemeron.communication.direct.memory_transport import MemoryNetwork
from ephemeron.events import Event, FaultFired, Invoked, Progress
from ephemeron.functions.base import Limits
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.prices import load_prices
from ephemeron.testing.pair_proxies import PairProxies
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.job import Simulation, Target, parse_fault

pytestmark = pytest.mark.slow

WORLD = Simulation(compute={"a": 2.0, "b": 0.0, "m": 0.0}, cold_start_s=0.05, warm_start_s=0.01)
JOB = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.2, "hidden": 2_000}), epochs=2, simulation=WORLD)
RANKS = 3
EVERY_PAIR = ((0, 1), (0, 2), (1, 2))

Trouble = Callable[[PairProxies], None]


class ProxiedRun:
    """A run of functions in this event loop, in real time, whose connections pass proxies.

    Args:
        troubles: what to do with the network, by the iteration that rank 0 has done.
        faults: of functions.
        channel: of the run.
    """

    def __init__(self, troubles: dict[int, Trouble], faults: tuple[str, ...], channel: str) -> None:
        self.troubles, self.faults, self.channel = dict(troubles), faults, channel
        self.events: list[Event] = []
        self.proxies = PairProxies()

    def see(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Progress) and event.rank == 0 and event.iteration in self.troubles:
            self.troubles.pop(event.iteration)(self.proxies)

    def of(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    async def weights(self) -> str:
        prices = load_prices("objects")
        c = configuration(workers=RANKS, batch_size=48, checkpoint_every=4, channel=self.channel, function_timeout_s=300.0)
        faults = [parse_fault(f) for f in self.faults]
        prepared = prepare(JOB, c, run_id="run", limits=Limits(), prices=prices, faults=faults, cold_start_s=0.05)
        platform = SimulatedPlatform(WORLD, seed=prepared.spec.seed, limits=Limits())
        platform.network = cast("MemoryNetwork", self.proxies)
        driver = RunDriver(
            platform, platform.store, prepared.spec, channel_address="memory", clock=asyncio.get_running_loop().time, on_event=self.see
        )
        try:
            await driver.launch(prepared)
            ended = await driver.watch()
        finally:
            await self.proxies.close()
        assert ended.status == "finished", ended.causes
        assert not self.troubles, "all have come"
        assert len(self.of(FaultFired)) == len(self.faults)
        store: Any = platform.store
        assert set(store.objects) == {"run/spec", "run/result"}
        return cast("str", ended.final.weights_sha256)


def run(troubles: dict[int, Trouble] | None = None, *faults: str, channel: str = "direct") -> tuple[str, ProxiedRun]:
    """Weights of a run, and what has happened."""
    made: list[ProxiedRun] = []

    async def go() -> str:
        made.append(ProxiedRun(troubles or {}, faults, channel))
        async with asyncio.timeout(200):
            return await made[0].weights()

    return asyncio.run(go()), made[0]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Weights of the same schedule over the store."""
    return run(channel="memory")[0]


def slow(proxies: PairProxies) -> None:
    for pair in EVERY_PAIR:
        proxies.slow(*pair, delay_s=0.002, mb_s=30.0)


def reset(proxies: PairProxies) -> None:
    for pair in EVERY_PAIR:
        proxies.reset(*pair)


def test_slow_links_resets_and_a_pair_that_is_cut_off_for_some_time(undisturbed: str) -> None:
    troubles: dict[int, Trouble] = {
        1: slow,
        3: reset,
        5: lambda proxies: proxies.cut(0, 1),
        8: reset,
        11: lambda proxies: proxies.heal(0, 1),
        13: reset,
    }
    weights, seen = run(troubles)
    assert weights == undisturbed
    assert len(seen.of(Invoked)) == RANKS, "nobody was taken for dead"
    for pair in EVERY_PAIR:
        assert seen.proxies.pair(*pair).carried > 1_000_000


def test_a_half_open_pair_whose_third_one_dies(undisturbed: str) -> None:
    """Rank 1 forwards between the others until it dies; its replacement does so again."""
    weights, seen = run({4: lambda proxies: proxies.swallow(0, 2)}, "kill:rank=1,iteration=9,phase=upload")
    assert weights == undisturbed
    assert [e.rank for e in seen.of(Invoked) if e.reason != "start"] == [1]


def test_a_rank_that_nothing_reaches_goes_on_through_the_store(undisturbed: str) -> None:
    def alone(proxies: PairProxies) -> None:
        proxies.swallow(0, 1)
        proxies.cut(1, 2)

    weights, seen = run({6: alone}, "kill:rank=2,iteration=12,phase=wait")
    assert weights == undisturbed
    assert [e.rank for e in seen.of(Invoked) if e.reason != "start"] == [2]
