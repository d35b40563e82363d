"""Programs in virtual time while anything dies: executors, the provisioner, the client; frozen executors that wake, lost and failing requests.

Whatever happens, the tiles are those of `interpret`, bit for bit, and no temporary tile is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from benchmarks.provisioner import Provisioner, ScalingLimits

from ephemeron.communication.channels import MemoryChannel
from ephemeron.communication.channels.base import Buffer, Channel, Wrapper
from ephemeron.errors import ChannelUnreachable
from ephemeron.functions.simulation import virtual_time
from ephemeron.functions.tasks import ObjectQueue
from ephemeron.functions.tasks.executor import TaskExecutor
from ephemeron.functions.tasks.executor_options import ExecutorOptions
from ephemeron.functions.tasks.model import TaskEdge, TaskSpec
from ephemeron.functions.tasks.object_places import ObjectPlaces
from ephemeron.functions.tasks.open_queue import queue_channel
from ephemeron.functions.tasks.resolver import Resolver, TaskFunction
from ephemeron.linalg.algorithms.equations import cholesky, lu
from ephemeron.linalg.algorithms.qr import qr
from ephemeron.linalg.algorithms.spectral import hermitian_band, upper_band
from ephemeron.linalg.execution.program_data import ProgramData
from ephemeron.linalg.execution.program_graph import ProgramGraph, open_program
from ephemeron.linalg.interpret import interpret
from ephemeron.linalg.language.kernel import load_kernel
from ephemeron.linalg.language.program import Program, Role
from ephemeron.linalg.matrices.stored import TileFamily, decode_tile, encode_tile

T = TypeVar("T")
STORE = "tiles:"
TILE = 3


class Modelled:
    """Each task takes some seconds of virtual time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def __call__(self, work: Callable[[], T], *, samples: float) -> T:
        await asyncio.sleep(self._rng.expovariate(1.0) * samples)
        return work()


class Network(Wrapper):
    """A function's connection to a store: acknowledges puts and loses them, fails, or is frozen with its function."""

    def __init__(self, inner: Channel, rng: random.Random, awake: asyncio.Event, *, lost: float, failing: float) -> None:
        super().__init__(inner)
        self._rng, self._awake, self._lost, self._failing = rng, awake, lost, failing

    async def _request(self, key: str) -> None:
        await asyncio.sleep(self._rng.random() * 0.1)
        await self._awake.wait()
        if self._rng.random() < self._failing:
            raise ChannelUnreachable("refused", key=key)

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self._request(key)
        if self._rng.random() >= self._lost:
            await self.inner.put(key, buffers, create=create)
        await self._awake.wait()

    async def fetch(self, key: str) -> memoryview | None:
        await self._request(key)
        found = await self.inner.fetch(key)
        await self._awake.wait()
        return found

    async def list(self, prefix: str) -> list[str]:
        await self._request(prefix)
        found = await self.inner.list(prefix)
        await self._awake.wait()
        return found

    async def delete(self, keys: Iterable[str]) -> None:
        await self._request("")
        await self.inner.delete(keys)


class Programs(Resolver):
    """Tasks of one program."""

    def __init__(self, data: bytes, channel: Channel) -> None:
        self._data, self._channel, self._graph = data, channel, ProgramGraph.__new__(ProgramGraph)

    async def resolve(self, function: str) -> TaskFunction:
        async def load(reference: str) -> Any:
            return load_kernel(reference)

        self._graph = await open_program(self._data, self._channel, load)
        return self._graph.run

    def edges(self, task: TaskSpec) -> Sequence[TaskEdge]:
        return self._graph.edges(task)

    def readers(self, task: TaskSpec) -> Any:
        return self._graph.readers(task)

    def is_stored(self, task: TaskSpec) -> bool:
        return self._graph.is_stored(task)

    async def look_again(self, task: TaskSpec) -> bool:
        return await self._graph.look_again(task)

    async def unread(self, task: TaskSpec) -> Sequence[str]:
        return await self._graph.unread(task)


class World:
    """Stores, a program, and the functions and clients that run it."""

    def __init__(self, program: Program, sizes: dict[str, int], seed: int, **faults: Any) -> None:
        self.rng = random.Random(seed)
        self.program, self.sizes = program, sizes
        self.objects, self.tiles = MemoryChannel(), MemoryChannel()
        self.lost, self.failing = faults.get("lost", 0.0), faults.get("failing", 0.0)
        self.lifetimes = faults.get("lifetimes", (600.0,))
        self.duplicates = faults.get("duplicates", 0.0)
        self.lease_s = 10.0
        self.executors: list[tuple[asyncio.Task[Any], asyncio.Event]] = []
        self.totals: list[Any] = []
        n, tiles = sizes["N"] * TILE - 1, range(sizes["N"])
        g = np.random.default_rng(seed).standard_normal((n, n))
        a = g @ g.T + np.eye(n)
        self.inputs = {"A": {(i, j): a[TILE * i : TILE * (i + 1), TILE * j : TILE * (j + 1)].copy() for i in tiles for j in tiles}}

    def data(self, *, resumes: bool) -> ProgramData:
        families = {m.name: TileFamily(store=STORE, name=m.name) for m in self.program.matrices if m.role is not Role.TEMPORARY}
        return ProgramData(
            text=str(self.program),
            kernels=dict(self.program.kernels),
            sizes=self.sizes,
            matrices={},
            families=families,
            temporaries="temporary",
            store=STORE,
            tries=50,
            resumes=resumes,
        )

    async def store_inputs(self) -> None:
        places = self.places(self.objects, self.tiles, "client")
        for name, tiles in self.inputs.items():
            for index, tile in tiles.items():
                await places.put(TileFamily(store=STORE, name=name).key(index), encode_tile(tile))

    def places(self, objects: Channel, tiles: Channel, owner: str) -> ObjectPlaces:
        inner = queue_channel(objects, "q", owner=f"{owner}-data", key="")
        return ObjectPlaces(inner, owner=f"{owner}-data", open_channel=lambda _: tiles, cache_bytes=400)

    async def start(self, run: str, number: int, data: bytes) -> None:
        for copy in range(2 if self.rng.random() < self.duplicates else 1):
            name, awake = f"{number}-{run}-{copy}", asyncio.Event()
            awake.set()
            one = asyncio.create_task(self._executor(run, name, awake, data))
            self.executors.append((one, awake))

    async def _executor(self, run: str, name: str, awake: asyncio.Event, data: bytes) -> None:
        objects = Network(self.objects, self.rng, awake, lost=self.lost, failing=self.failing)
        tiles = Network(self.tiles, self.rng, awake, lost=self.lost, failing=self.failing)
        places = self.places(objects, tiles, name)
        queue = ObjectQueue(queue_channel(objects, run, owner=name, key=""), run, owner=name, lease_s=self.lease_s)
        deadline = asyncio.get_running_loop().time() + self.rng.choice(self.lifetimes)
        one = TaskExecutor(
            queue,
            places,
            Programs(data, places),
            Modelled(self.rng),
            name=name,
            deadline=deadline,
            data_prefix=f"{run}.data/",
            options=ExecutorOptions(idle_s=5.0, flush_s=0.0, margin_s=1.0),
        )
        self.totals.append(await one.run())

    async def provision(self, run: str, data: bytes) -> None:
        queue = ObjectQueue(
            queue_channel(self.objects, run, owner=f"p{self.rng.random()}", key=""),
            run,
            owner=f"p{self.rng.getrandbits(40)}",
            lease_s=self.lease_s,
        )
        first = len(self.executors)
        limits = ScalingLimits(most=4, burst=4, starts_per_s=4, start_s=5)
        await Provisioner(queue, lambda number: self.start(run, first + number, data), limits).run()

    async def client(self, run: str, *, resumes: bool) -> int:
        """Publishes the first tasks, waits for all results, ends the queue. Returns how many tasks were stored before."""
        data = self.data(resumes=resumes)
        graph = ProgramGraph(data, self.program)
        queue = ObjectQueue(queue_channel(self.objects, run, owner="client", key=""), run, owner="client", lease_s=self.lease_s)
        for task, order in graph.starts("g0", "node"):
            await queue.publish([task], order=order)
        reader, stored = queue.reader(), dict[str, Any]()
        while len(stored) < graph.tasks:
            await asyncio.sleep(1.0)
            for result in await reader.read():
                assert result.status == "ok", result
                assert result.id not in stored, "one visible result"
                stored[result.id] = result.value
        await queue.finish()
        return sum(value.get("stored", 0) for value in stored.values())

    async def remains(self) -> list[str]:
        """Temporary tiles."""
        return await self.places(self.objects, self.tiles, "check").list(f"{STORE}#temporary/")

    async def check(self) -> None:
        places = self.places(self.objects, self.tiles, "check")
        for name, tiles in interpret(self.program, self.sizes, self.inputs).items():
            for index, wanted in tiles.items():
                found = await places.fetch(key := TileFamily(store=STORE, name=name).key(index))
                assert found is not None, key
                assert decode_tile(found).tobytes() == np.ascontiguousarray(wanted).tobytes(), key

    def running(self) -> list[tuple[asyncio.Task[Any], asyncio.Event]]:
        return [each for each in self.executors if not each[0].done()]

    async def ended(self) -> None:
        """Waits for all executors; an error of one is an error."""
        for _, awake in self.executors:
            awake.set()
        ends = await asyncio.gather(*(task for task, _ in self.executors), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end


FAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "killed executors": {"deaths": 12},
    "killed together": {"massacres": 3},
    "killed provisioners": {"provisioners": 5, "lifetimes": (6.0, 15.0)},
    "frozen executors": {"freezes": 6},
    "short lifetimes": {"lifetimes": (3.5, 5.0, 8.0)},
    "duplicated calls": {"duplicates": 0.7},
    "lost puts": {"lost": 0.1},
    "failing requests": {"failing": 0.1},
    "everything": {
        "deaths": 5,
        "freezes": 3,
        "provisioners": 2,
        "lifetimes": (5.0, 12.0, 600.0),
        "duplicates": 0.3,
        "lost": 0.03,
        "failing": 0.03,
    },
}
PROGRAMS = {
    "cholesky": (cholesky, {"N": 4}),
    "lu": (lu, {"M": 3, "N": 3}),
    "qr": (qr, {"M": 3, "N": 3}),
    "upper band": (upper_band, {"M": 3, "N": 3}),
    "hermitian band": (hermitian_band, {"N": 3}),
}


def simulate(name: str, faults: dict[str, Any], seed: int) -> World:
    program, sizes = PROGRAMS[name]
    world = World(program, sizes, seed, **faults)
    rng = world.rng

    async def some(times: str, act: Callable[[], None]) -> None:
        for _ in range(faults.get(times, 0)):
            await asyncio.sleep(rng.expovariate(1 / 3.0))
            act()

    def kill() -> None:
        if running := world.running():
            rng.choice(running)[0].cancel()

    def kill_all() -> None:
        for task, _ in world.running():
            task.cancel()

    def freeze() -> None:
        if running := world.running():
            awake = rng.choice(running)[1]
            awake.clear()
            asyncio.get_running_loop().call_later(rng.uniform(2, 40), awake.set)

    async def main() -> None:
        await world.store_inputs()
        data = world.data(resumes=False).to_bytes()
        provisioner = asyncio.create_task(world.provision("q", data))

        def replace_provisioner() -> None:
            nonlocal provisioner
            provisioner.cancel()
            provisioner = asyncio.create_task(world.provision("q", data))

        async with asyncio.timeout(5_000):
            troubles = [
                asyncio.create_task(some(times, act))
                for times, act in (("deaths", kill), ("massacres", kill_all), ("freezes", freeze), ("provisioners", replace_provisioner))
            ]
            await world.client("q", resumes=False)
            for trouble in troubles:
                trouble.cancel()
            await provisioner
            await world.ended()
        await world.check()
        if not {"deaths", "massacres"} & set(faults):  # an executor that dies may leave tiles to the end of the run
            assert await world.remains() == []

    virtual_time.run(main())
    return world


@pytest.mark.parametrize("n", range(len(FAULTS)), ids=list(FAULTS))
def test_bits_are_the_same_whatever_dies(n: int) -> None:
    simulate(list(PROGRAMS)[n % len(PROGRAMS)], list(FAULTS.values())[n], n)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_the_same_whatever_dies_in_many_schedules(name: str, seed: int) -> None:
    for faults in FAULTS.values():
        simulate(name, faults, seed)


@pytest.mark.parametrize("seed", range(6))
def test_a_client_that_follows_a_killed_one_shares_its_tiles_with_functions_that_go_on(seed: int) -> None:
    """Two runs of one program at once: each deletes tiles that the other may be about to read."""
    name = list(PROGRAMS)[seed % len(PROGRAMS)]
    program, sizes = PROGRAMS[name]
    world = World(program, sizes, seed)

    async def main() -> None:
        await world.store_inputs()
        first = asyncio.create_task(world.client("first", resumes=False))
        provisioning = asyncio.create_task(world.provision("first", world.data(resumes=False).to_bytes()))
        await asyncio.sleep(world.rng.uniform(3, 10))
        first.cancel()
        provisioning.cancel()
        assert world.running(), "functions go on without a client"
        following = asyncio.create_task(world.provision("second", world.data(resumes=True).to_bytes()))
        async with asyncio.timeout(5_000):
            stored = await world.client("second", resumes=True)
            await following
            await world.ended()
        assert stored, "tasks of the first run are not computed again"
        await world.check()
        assert await world.remains() == []

    virtual_time.run(main())
