"""CPU times that `benchmarks.scaling` simulates with, measured on this machine: of a minibatch, of the client, and of a shard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import SEED
from benchmarks.sparse_store_sides import TOKEN
from benchmarks.sparse_training_data import FEATURES, ROWS_PER_PARTITION, prepared
from ephemeron.sparse.models import LogisticRegression
from ephemeron.sparse.store import AdaGrad, SparseStore
from ephemeron.sparse.store.frame import Head, Kind
from ephemeron.sparse.store.processes import ShardProcesses
from ephemeron.sparse.store.shard import ShardOptions
from ephemeron.sparse.training.minibatches import Ring, Schedule

ROWS = FEATURES + 1
ENTRIES = (100, 1_000, 10_000, 50_000)
SHARDS = (1, 4)
CLIENTS = 4
"""At once: a shard that is busy takes several frames for each wake-up."""
_KEPT = 12
_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of a request: `fixed_s` for each frame and `entry_s` for each of its entries."""

    fixed_s: float
    entry_s: float
    call_s: float = 0.0
    """At the client: for each operation, whatever the number of shards."""

    def seconds(self, entries: float, frames: int = 1) -> float:
        """Of a request."""
        return self.call_s + self.fixed_s * frames + self.entry_s * entries


@dataclass(frozen=True, slots=True)
class Minibatches:
    """Real minibatches of one size."""

    size: int
    load_s: float
    """CPU seconds to read, decode and cut one, and to find its rows."""
    compute_s: float
    """CPU seconds of its gradient."""
    rows: tuple[NDArray[np.int64], ...]
    """Rows of the model that some of them need."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All of it."""

    partition_bytes: int
    partition_rows: int
    minibatches: dict[int, Minibatches]
    get: Cost
    """A shard's."""
    push: Cost
    client: Cost
    """A client's, for multi-get and push together; frames are counted in pairs."""

    def service_s(self, head: Head) -> float:
        """CPU seconds of a shard for a frame."""
        if head.kind == Kind.GET:
            return self.get.seconds(head.length)
        return self.push.seconds(head.length) if head.kind == Kind.PUSH else 0.0  # acknowledgements are in the pushes

    def to_json(self) -> dict[str, Any]:
        """As a part of the result."""
        return {
            "partition_bytes": self.partition_bytes,
            "partition_rows": self.partition_rows,
            "minibatches": [
                {
                    "size": m.size,
                    "load_cpu_s": round(m.load_s, 7),
                    "compute_cpu_s": round(m.compute_s, 7),
                    "rows": round(float(np.mean([r.size for r in m.rows]))),
                }
                for m in self.minibatches.values()
            ],
            "shard_get": _rounded(self.get),
            "shard_push": _rounded(self.push),
            "client_step": _rounded(self.client),
        }


def measure(folder: Path, sizes: Sequence[int]) -> Measured:
    """Measures on one partition of about 10 MB, real shards as processes, and connections over loopback."""
    dataset = prepared(folder, rows=ROWS_PER_PARTITION)
    nbytes = sum(path.stat().st_size for path in folder.rglob("*.arrow"))
    get, push, client = asyncio.run(_store())
    return Measured(
        partition_bytes=nbytes,
        partition_rows=ROWS_PER_PARTITION,
        get=get,
        push=push,
        client=client,
        minibatches={size: _minibatches(dataset, size) for size in sizes},
    )


def _minibatches(dataset: Any, size: int) -> Minibatches:
    """Of one epoch, each loaded when it is asked for."""
    model = LogisticRegression(features=FEATURES)
    schedule = Schedule(rows=(ROWS_PER_PARTITION,), batch_size=size, epochs=1, workers=1, seed=SEED)
    load: list[float] = []
    compute: list[float] = []
    kept: list[NDArray[np.int64]] = []
    for _ in range(2):  # the first is a warm-up
        load.clear()
        compute.clear()
        with Ring(dataset, schedule, 0, model.rows, size=0) as ring:
            began = time.process_time()
            for step, batch, rows in ring:
                loaded = time.process_time()
                values = {name: np.zeros((index.size, 1), np.float32) for name, index in rows.items()}
                at = time.process_time()
                model.step(batch, rows, values, step.step)
                compute.append(time.process_time() - at)
                load.append(loaded - began)
                if len(kept) < _KEPT:
                    kept.append(np.asarray(rows["weights"], np.int64))
                began = time.process_time()
    return Minibatches(size, float(np.mean(load)), float(np.median(compute)), tuple(kept))


async def _store() -> tuple[Cost, Cost, Cost]:
    """Costs of requests, by least squares over sizes, and for the client also over numbers of shards."""
    gets: list[tuple[int, float]] = []
    both: list[tuple[int, float]] = []
    steps: list[tuple[int, int, float]] = []
    for count in SHARDS:
        processes = ShardProcesses([ShardOptions(shard=i, shards=count) for i in range(count)], token=TOKEN)
        addresses = await processes.start()
        clients = [await SparseStore.connect(addresses, TOKEN) for _ in range(CLIENTS)]
        try:
            for client in clients:
                await client.create("w", ROWS, optimizer=AdaGrad(learning_rate=0.1))
            for entries in ENTRIES:
                got, _ = await _requests(clients, entries, push=False)
                stepped, client_s = await _requests(clients, entries, push=True)
                steps.append((count, entries, client_s))
                gets.append((entries // count, got / count))
                both.append((entries // count, stepped / count))
        finally:
            await asyncio.gather(*(client.close() for client in clients))
            await processes.close()
    get, step = _line(gets), _line(both)
    push = Cost(max(0.0, step.fixed_s - get.fixed_s), max(0.0, step.entry_s - get.entry_s))
    return get, push, _plane(steps)


async def _requests(clients: Sequence[SparseStore], entries: int, *, push: bool) -> tuple[float, float]:
    """CPU seconds of a multi-get, or of a step of multi-get and push: at all shards together, and at the client."""
    dice = np.random.default_rng(SEED)
    rows = [np.sort(dice.choice(ROWS, entries, replace=False)) for _ in range(8)]
    gradient = dice.normal(0, 1, (entries, 1)).astype(np.float32)
    counts = [0] * len(clients)

    async def shard_s() -> float:
        return sum(status.cpu_s for status in await clients[0].status())

    async def requests(which: int, ends_at: float) -> None:
        while time.perf_counter() < ends_at:
            index = rows[counts[which] % 8]
            await clients[which].multi_get("w", index)
            if push:
                await clients[which].push("w", index, gradient)
            counts[which] += 1
        await clients[which].flush()

    for seconds in (_SECONDS / 5, _SECONDS):  # the first is a warm-up
        counts[:] = [0] * len(clients)
        before, own, ends_at = await shard_s(), time.process_time(), time.perf_counter() + seconds
        await asyncio.gather(*(requests(which, ends_at) for which in range(len(clients))))
        own = time.process_time() - own
        found = (await shard_s() - before) / sum(counts), own / sum(counts)
    return found


def _line(points: list[tuple[int, float]]) -> Cost:
    weights = 1 / np.array([seconds for _, seconds in points])  # relative errors
    matrix = np.array([[1.0, entries] for entries, _ in points])
    fixed, entry = np.linalg.lstsq(matrix * weights[:, None], np.ones(len(points)), rcond=None)[0]
    return Cost(max(0.0, float(fixed)), max(0.0, float(entry)))


def _plane(points: list[tuple[int, int, float]]) -> Cost:
    weights = 1 / np.array([seconds for *_, seconds in points])
    matrix = np.array([[1.0, count, entries] for count, entries, _ in points])
    call, fixed, entry = np.linalg.lstsq(matrix * weights[:, None], np.ones(len(points)), rcond=None)[0]
    return Cost(max(0.0, float(fixed)), max(0.0, float(entry)), max(0.0, float(call)))


def _rounded(cost: Cost) -> dict[str, float]:
    return {f"{name[:-2]}_us": round(1e6 * value, 4) for name, value in asdict(cost).items()}
