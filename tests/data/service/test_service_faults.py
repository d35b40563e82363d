"""Everything that can be killed or stopped is, at given batches; what is delivered is what an undisturbed run delivers."""

from __future__ import annotations

import itertools
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from service_worlds import HASTY, World, epochs_of, local, mixed, plain, settings, signalled, until

from ephemeron.communication.rpc import BlockingClient
from ephemeron.data.service import client as client_module
from ephemeron.data.service.messages import Nothing
from ephemeron.data.service.protocol import PING
from ephemeron.data.service.settings import ServiceAddress
from ephemeron.errors import ConnectionLost

pytestmark = pytest.mark.slow

SAMPLES, BATCH = 60, 3
FLOW = "test/mortal"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("mortal"), settings(shards=2, loaders=2, timeouts=HASTY))
    yield world
    world.close()


def undisturbed(seed: int) -> list[list[Any]]:
    return epochs_of(local(mixed(SAMPLES, FLOW)), 2, batch_size=BATCH, seed=seed)


def kill_loaders(world: World) -> None:
    world.kill_loaders(FLOW)


def stop_a_loader(world: World) -> None:
    def stopped() -> psutil.Process | None:
        for process in world.loaders(FLOW):
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                return process
        return None

    process = until(stopped, "loaders")
    until(lambda: not process.is_running(), "it to be given up")


def kill_shard(world: World, number: int = 0) -> None:
    signalled(world.shard(FLOW, number), signal.SIGKILL)


def stop_shard(world: World) -> None:
    stopped = signalled(world.shard(FLOW, 1), signal.SIGSTOP)
    until(lambda: world.shard(FLOW, 1)._pid() != stopped, "another shard")


def kill_router(world: World) -> None:
    signalled(world.router(FLOW), signal.SIGKILL)


def stop_router(world: World) -> None:
    stopped = signalled(world.router(FLOW), signal.SIGSTOP)
    until(lambda: world.router(FLOW)._pid() != stopped, "another router")


def kill_coordinator(world: World) -> None:
    world.service.call(PING, Nothing())  # nobody misses it, so perhaps it is still dead
    signalled(world.coordinator, signal.SIGKILL)


def kill_control(world: World) -> None:
    """Those who could bring each other back, all at once."""
    kill_coordinator(world)
    kill_router(world)


def kill_everything(world: World) -> None:
    for process in world.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


Fault = Callable[[World], None]
FAULTS: list[tuple[Fault, tuple[int, ...]]] = [
    (kill_loaders, (0, 19)),
    (stop_a_loader, (2,)),
    (kill_shard, (12,)),
    (stop_shard, (5,)),
    (kill_router, (7,)),
    (stop_router, (3,)),
    (kill_coordinator, (21,)),
    (kill_control, (6,)),
    (kill_everything, (9,)),
]


@pytest.mark.parametrize(("fault", "batches"), FAULTS, ids=lambda x: x.__name__ if callable(x) else str(x))
def test_nothing_is_lost(world: World, fault: Fault, batches: tuple[int, ...]) -> None:
    seed = FAULTS.index((fault, batches))  # of its own, or all would come from the cache
    got: list[list[Any]] = []
    number = itertools.count()
    with world.read(mixed(SAMPLES, FLOW)).to_shuffled(BATCH, plain, seed=seed, prefetch=2) as shuffled:
        for _ in range(2):
            got.append([])
            for batch in shuffled:
                got[-1].append(batch)
                if next(number) in batches:
                    fault(world)
    assert got == undisturbed(seed)
    assert next(number) == 40


def test_drawn_together_through_deaths(world: World) -> None:
    """Two jobs whose order only the router knows; each sample once per epoch and job, and its bytes are right."""
    seed = 1
    rng = random.Random(seed)
    truth = dict(plain(local(mixed(SAMPLES, FLOW).clone()).to_mapped(seed=seed).__getitems__(range(SAMPLES))))
    reads = [world.read(mixed(SAMPLES, FLOW), job=f"together-{n}") for n in range(2)]
    shuffled = [read.to_shuffled(BATCH, plain, seed=seed, prefetch=2, sampling="shared") for read in reads]
    points = {(rng.randrange(2), rng.randrange(20)): fault for fault in (kill_router, kill_shard, kill_control)}
    for epoch in range(2):
        got: list[list[Any]] = [[], []]
        for number, row in enumerate(zip(*shuffled, strict=True)):
            for job, batch in enumerate(row):
                got[job] += batch
            if (epoch, number) in points:
                points[epoch, number](world)
        for each in got:
            assert Counter(i for i, _ in each) == Counter(range(SAMPLES))
            if epoch == 0:
                assert dict(each) == truth
    for each in shuffled:
        each.close()


class Unreliable:
    """A connection whose answers are lost, and whose calls arrive twice."""

    def __init__(self, client: BlockingClient, rng: random.Random) -> None:
        self._client, self._rng = client, rng

    @property
    def connected(self) -> bool:
        return self._client.connected

    def close(self) -> None:
        self._client.close()

    def call(self, method: str, params: Any, buffers: Any = (), **options: Any) -> Any:
        if self._rng.random() < 0.1:
            self._client.call(method, params, buffers, **options)  # the first of two
        answer = self._client.call(method, params, buffers, **options)
        if self._rng.random() < 0.15:
            HAPPENED["lost"] += 1
            self._client.close()
            raise ConnectionLost("the answer was lost", may_repeat=False)
        return answer


HAPPENED: Counter[str] = Counter()


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_lost_and_calls_repeated(world: World, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng, connect = random.Random(seed), ServiceAddress.connect
    with monkeypatch.context() as patch:
        patch.setattr(ServiceAddress, "connect", lambda *a, **o: Unreliable(connect(*a, **o), rng))
        patch.setattr(client_module, "PAUSE_S", 0.01)
        HAPPENED.clear()
        assert epochs_of(world.read(mixed(SAMPLES, FLOW)), 2, batch_size=BATCH, seed=100 + seed) == undisturbed(100 + seed)
        assert HAPPENED["lost"] > 5
