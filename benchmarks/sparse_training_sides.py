"""Sides of `benchmarks.sparse_training`: functions over an object store, the sparse store, scikit-learn, and a parameter server on Ray.

Each gives how many gradients it has used by when, and weights at some moments, counted from its first gradient on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import SEED
from benchmarks.sparse_training_data import FEATURES
from ephemeron.communication.channels.address import open_channel
from ephemeron.data.tables import TableDataset, csr_batch
from ephemeron.errors import ChannelError
from ephemeron.executor import FunctionExecutor
from ephemeron.sparse.models import Batch, LogisticRegression
from ephemeron.sparse.store import AdaGrad, SparseStore
from ephemeron.sparse.store.processes import ShardProcesses
from ephemeron.sparse.store.shard import TOKEN_VARIABLE, ShardOptions
from ephemeron.sparse.training import fit
from ephemeron.sparse.training.minibatches import Ring, Schedule, part
from ephemeron.sparse.training.part import Part, train_part
from ephemeron.training.tensors import decode_state

FUNCTIONS = Path(__file__).resolve().parent / "sparse_training_functions"
sys.path.insert(0, str(FUNCTIONS))
import pywren  # noqa: E402 - a module that functions are sent

MODEL = LogisticRegression(features=FEATURES)
RATE = 0.1
BATCH = 100
TOKEN = "a benchmark on loopback, sparse training"
_LOOK_S = 0.4
"""Between two looks at the weights."""


@dataclass
class Trace:
    """What a side has done, in seconds since its first gradient."""

    gradients: list[tuple[float, int]] = field(default_factory=list)
    """Moments, and gradients used so far."""
    weights: list[tuple[float, Any]] = field(default_factory=list)
    """Moments, and weights then: float32[features + 1]."""
    began: float = 0.0
    batch: int = BATCH

    def count(self, gradients: int) -> None:
        """So many gradients have been used."""
        if not self.began and gradients:
            self.began = time.perf_counter()
        if self.began:
            self.gradients.append((time.perf_counter() - self.began, gradients))

    def look(self, weights: Any, *, at_least: float = _LOOK_S) -> None:
        """Keeps weights, if the last ones are old enough."""
        now = time.perf_counter() - self.began
        if self.began and (not self.weights or now - self.weights[-1][0] >= at_least):
            self.weights.append((now, np.array(weights)))

    @property
    def per_s(self) -> float:
        """Gradients per second, after the first ones."""
        (begin, first), (end, last) = self.gradients[0], self.gradients[-1]
        return (last - first) / max(end - begin, 1e-9)


# -- functions over an object store -------------------------------------------------------------------------


async def stored(dataset: TableDataset, folder: Path) -> tuple[str, int]:
    """Minibatches as objects: the address of the store, and how many."""
    address, number = folder.as_uri(), 0
    channel = open_channel(address)
    for index in range(len(dataset.partitions)):
        order = np.random.default_rng([SEED, index]).permutation(dataset.partitions[index].rows)
        whole = Batch(*csr_batch(dataset.read(index), order))
        for start in range(0, whole.samples, BATCH):
            await channel.put(f"batch/{number}", [pywren.encoded(part(whole, start, min(start + BATCH, whole.samples)))])
            number += 1
    return address, number


class Client:
    """Adds gradients up and stores the model, for functions over an object store."""

    def __init__(self, world: pywren.World) -> None:
        self.world, self.trace = world, Trace()
        self.objects = pywren.opened(world)
        self.weights = np.zeros(FEATURES + 1, np.float32)
        self._slots = {"n": np.zeros(FEATURES + 1, np.float32)}
        self._used = 0
        self._changed = asyncio.Event()

    async def publish(self, version: int | None) -> None:
        """Stores the model."""
        await self.objects.put(pywren.model_key(version), [self.weights.tobytes()])

    async def gradient(self, rank: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and gradient of a function's step."""
        key, left = pywren.gradient_key(rank, number), self.world.ends_at - time.time()
        received = await self.objects.get(key, deadline=asyncio.get_running_loop().time() + left)
        arrays, _ = decode_state(received.data)
        return arrays["rows"], arrays["gradient"]

    def use(self, gradients: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """One update with the mean of some gradients."""
        rows, at = np.unique(np.concatenate([rows for rows, _ in gradients]), return_inverse=True)
        sums = np.bincount(at, np.concatenate([g for _, g in gradients]), rows.size) / len(gradients)
        AdaGrad(learning_rate=RATE).apply(self.weights, self._slots, rows, sums.astype(np.float32))
        self._used += len(gradients)
        self.trace.count(self._used)
        self.trace.look(self.weights)
        self._changed.set()

    async def rounds(self) -> None:
        """Versions of the model, each from one gradient of each function."""
        version = 0
        while time.time() < self.world.ends_at:
            self.use(await asyncio.gather(*(self.gradient(rank, version) for rank in range(self.world.workers))))
            version += 1
            await self.publish(version)

    async def arrivals(self) -> None:
        """Updates by each gradient when it arrives; the newest model is stored over and over."""

        async def of(rank: int) -> None:
            for number in range(1 << 30):
                self.use([await self.gradient(rank, number)])

        async def newest() -> None:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self.publish(None)

        async with asyncio.timeout(self.world.ends_at - time.time()), asyncio.TaskGroup() as tasks:
            tasks.create_task(newest())
            for rank in range(self.world.workers):
                tasks.create_task(of(rank))


@asynccontextmanager
async def functions(workers: int) -> AsyncIterator[FunctionExecutor]:
    """So many functions of this machine, all of which have started."""
    with FunctionExecutor("local", max_workers=workers, retries=0, progress=False) as pool:
        started: set[int] = set()
        while len(started) < workers:
            started |= await asyncio.to_thread(lambda: set(pool.map(pywren.ready, range(workers))))
        yield pool


async def stateless(world: pywren.World, seconds: float) -> Trace:
    """PyWren's form: a map of functions for each update."""
    client = Client(replace(world, ends_at=time.time() + 3600))
    await client.publish(0)
    async with functions(world.workers) as pool:
        version, ends = 0, time.perf_counter() + seconds
        while time.perf_counter() < ends:
            calls = [pool.submit(pywren.stateless, client.world, rank, version) for rank in range(world.workers)]
            for call in calls:
                await asyncio.to_thread(call.result)
            client.use([await client.gradient(rank, version) for rank in range(world.workers)])
            version += 1
            await client.publish(version)
    return client.trace


async def lasting(world: pywren.World, seconds: float, *, prefetch: bool, asynchronous: bool) -> Trace:
    """Functions that make many steps."""
    async with functions(world.workers) as pool:
        ends_at = time.time() + seconds
        client = Client(replace(world, ends_at=ends_at, prefetch=prefetch, asynchronous=asynchronous))
        await client.publish(None if asynchronous else 0)
        calls = [pool.submit(pywren.lasting, client.world, rank) for rank in range(world.workers)]
        try:
            await (client.arrivals() if asynchronous else client.rounds())
        except (TimeoutError, ChannelError, ExceptionGroup):
            if time.time() < ends_at - 0.5:
                raise
        for call in calls:
            await asyncio.to_thread(call.result)
    return client.trace


# -- the sparse store ---------------------------------------------------------------------------------------


@asynccontextmanager
async def served() -> AsyncIterator[tuple[list[str], SparseStore]]:
    """One shard, its token in the environment."""
    os.environ[TOKEN_VARIABLE] = TOKEN
    processes = ShardProcesses([ShardOptions()], token=TOKEN)
    addresses = await processes.start()
    try:
        async with await SparseStore.connect(addresses, TOKEN) as store:
            yield addresses, store
    finally:
        await processes.close()


async def watched(store: SparseStore, work: asyncio.Future[Any]) -> Trace:
    """Counts of the shard, and the table, until some work is done."""
    trace = Trace()
    while not work.done():
        trace.count(sum(status.pushes for status in await store.status()))
        if trace.began:
            trace.look((await store.read(pywren.WEIGHTS))[:, 0])
        await asyncio.sleep(0.02)
    await work
    trace.look((await store.read(pywren.WEIGHTS))[:, 0], at_least=0.0)
    return trace


async def whole_model(world: pywren.World, seconds: float) -> Trace:
    """The sparse store instead of the object store: the model is read whole."""
    async with served() as (addresses, store):
        await store.create(pywren.WEIGHTS, FEATURES + 1, optimizer=AdaGrad(learning_rate=RATE))
        async with functions(world.workers) as pool:
            told = replace(world, store=tuple(addresses), prefetch=True, asynchronous=True, ends_at=time.time() + seconds)
            calls = [pool.submit(pywren.lasting, told, rank) for rank in range(world.workers)]
            work = asyncio.gather(*(asyncio.to_thread(call.result) for call in calls))
            return await watched(store, work)


async def multi_get(dataset: TableDataset, workers: int, epochs: int) -> tuple[Trace, dict[str, float]]:
    """`fit`: only the rows of a minibatch are read. Also the microseconds of a step by phase."""
    async with served() as (addresses, store):
        await store.create(pywren.WEIGHTS, FEATURES + 1, optimizer=AdaGrad(learning_rate=RATE))  # as `fit` does
        work = asyncio.ensure_future(
            asyncio.to_thread(
                fit, MODEL, dataset, AdaGrad(learning_rate=RATE), epochs=epochs, batch_size=BATCH, workers=workers, store=addresses
            )
        )
        trace = await watched(store, work)
        return trace, dict((await work).step_us)


async def one_function(dataset: TableDataset, batch: int, steps: int) -> dict[str, float]:
    """Microseconds of a step by phase, of one function in this process and one shard, and their CPU time."""
    async with served() as (addresses, store):
        await store.create(pywren.WEIGHTS, FEATURES + 1, optimizer=AdaGrad(learning_rate=RATE))
        rows, left = [], steps * batch
        for partition in dataset.partitions:
            rows.append(min(partition.rows, left))
            left -= rows[-1]
        schedule = Schedule(rows=tuple(rows), batch_size=batch, epochs=1, workers=1)
        share = Part(run="split", rank=0, attempt=0, model=MODEL, dataset=dataset, schedule=schedule, addresses=tuple(addresses))
        shard, began = (await store.status())[0].cpu_s, time.process_time()
        report = await asyncio.to_thread(train_part, share)
        function, shard = time.process_time() - began, (await store.status())[0].cpu_s - shard
    found = {**report.seconds, "cpu_function": function, "cpu_shard": shard}
    return {name: 1e6 * seconds / report.steps for name, seconds in found.items()}


# -- peers --------------------------------------------------------------------------------------------------


def scikit_learn(dataset: TableDataset, rate: float, seconds: float) -> Trace:
    """`SGDClassifier`, one process: an update for each sample."""
    import scipy.sparse as sp
    from sklearn.linear_model import SGDClassifier

    model = SGDClassifier(loss="log_loss", penalty=None, learning_rate="constant", eta0=rate, random_state=0)
    trace, used, epoch = Trace(batch=1), 0, 0
    trace.began = began = time.perf_counter()
    trace.gradients.append((0.0, 0))
    while time.perf_counter() - began < seconds:
        for index, partition in enumerate(dataset.partitions):
            order = np.random.default_rng([SEED, epoch, index]).permutation(partition.rows)
            batch = Batch(*csr_batch(dataset.read(index), order))
            places = batch.indices.astype(np.int32), batch.indptr.astype(np.int32)
            x = sp.csr_array((batch.values, *places), shape=(batch.samples, FEATURES))
            model.partial_fit(x, batch.labels, classes=[0, 1])
            used += batch.samples
            trace.count(used)
            trace.look(np.append(model.coef_[0], model.intercept_).astype(np.float32))
        epoch += 1
    return trace


def ray_server(dataset: TableDataset, workers: int, seconds: float) -> Trace:
    """A parameter server as an actor, workers as actors; minibatches, model and optimiser as ours."""
    import ray

    path = str(FUNCTIONS.parent.parent)
    ray.init(
        num_cpus=workers + 1,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        object_store_memory=200 << 20,
    )
    try:
        server = ray.remote(_RayServer).remote()
        made = [ray.remote(_RayWorker).remote(server, dataset.url, rank, workers) for rank in range(workers)]
        ray.get([worker.ready.remote() for worker in made])
        trace = Trace()
        calls = [worker.train.remote(seconds) for worker in made]
        while True:
            done, _ = ray.wait(calls, num_returns=workers, timeout=0.1)
            count, weights = ray.get(server.state.remote())
            trace.count(count)
            trace.look(weights)
            if len(done) == workers:
                ray.get(calls)
                return trace
    finally:
        ray.shutdown()


class _RayServer:
    def __init__(self) -> None:
        self.weights, self.slots, self.count = (np.zeros(FEATURES + 1, np.float32), {"n": np.zeros(FEATURES + 1, np.float32)}, 0)

    def get(self, rows: np.ndarray) -> np.ndarray:
        return self.weights[rows]

    def push(self, rows: np.ndarray, gradient: np.ndarray) -> None:
        AdaGrad(learning_rate=RATE).apply(self.weights, self.slots, rows, gradient)
        self.count += 1

    def state(self) -> tuple[int, np.ndarray]:
        return self.count, self.weights


class _RayWorker:
    def __init__(self, server: Any, url: str, rank: int, workers: int) -> None:
        self.server, self.rank, self.dataset = server, rank, TableDataset.open(url)
        rows = tuple(p.rows for p in self.dataset.partitions)
        self.schedule = Schedule(rows=rows, batch_size=BATCH, epochs=1000, workers=workers)

    def ready(self) -> None:
        """Made."""

    def train(self, seconds: float) -> int:
        import ray

        ends, steps, pending = time.perf_counter() + seconds, 0, []
        with Ring(self.dataset, self.schedule, self.rank, MODEL.rows) as ring:
            for _, batch, rows in ring:
                at = rows[pywren.WEIGHTS]
                values = ray.get(self.server.get.remote(at))
                found = MODEL.step(batch, rows, {pywren.WEIGHTS: values[:, None]})
                pending.append(self.server.push.remote(at, found.gradients[pywren.WEIGHTS][:, 0]))
                if len(pending) >= 16:
                    ray.get(pending.pop(0))
                steps += 1
                if time.perf_counter() >= ends:
                    break
        ray.get(pending)
        return steps
