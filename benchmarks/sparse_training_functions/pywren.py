"""SGD steps of logistic regression as functions over an object store, as PyWren makes them, and what improves them (survey 2.2, figure 9).

`stateless` is one step of one function, which starts from nothing: minibatch and model are fetched, the gradient is stored. `lasting`
is a function that makes many steps. The client adds gradients up and stores the model, but with the sparse store, which does that itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.wrappers import Throttled
from ephemeron.errors import ChannelError
from ephemeron.sparse.models import Batch, LogisticRegression
from ephemeron.sparse.store import SparseStore
from ephemeron.sparse.store.shard import TOKEN_VARIABLE
from ephemeron.training.tensors import decode_state, encode_state

LATENCY_S, BANDWIDTH_MB_S = 0.01, 70.0
"""Of the object store, per request and for each function: survey 2.1 and 2.2 have 10 ms, FuncPipe 70 MB/s."""
_AHEAD = 4
"""Minibatches that are fetched ahead, and gradients that are stored in the background."""
WEIGHTS = "weights"


@dataclass(frozen=True)
class World:
    """What a function needs to know."""

    objects: str
    """Address of the object store."""
    features: int
    batches: int
    """Minibatches that are stored."""
    workers: int
    ends_at: float = 0.0
    """Time at which lasting functions end."""
    prefetch: bool = False
    asynchronous: bool = False
    store: tuple[str, ...] = ()
    """Addresses of the shards that hold the model; empty: the object store holds it."""


def opened(world: World) -> Channel:
    """The object store, with the latency and bandwidth of one function."""
    return Throttled(open_channel(world.objects), latency_s=LATENCY_S, bandwidth_mb_s=BANDWIDTH_MB_S)


def encoded(batch: Batch) -> bytes:
    """A minibatch as an object."""
    assert batch.labels is not None
    arrays = {"indptr": batch.indptr, "indices": batch.indices, "values": batch.values, "labels": batch.labels}
    return encode_state(arrays, {})


def model_key(version: int | None) -> str:
    """Key of a version of the model; None: of the newest one."""
    return f"model/{'newest' if version is None else version}"


def gradient_key(rank: int, number: int) -> str:
    return f"gradient/{rank}.{number}"


def ready(rank: int) -> int:
    """The process of a function, which has imported this module."""
    time.sleep(0.5)
    return os.getpid()


def stateless(world: World, rank: int, version: int) -> None:
    """One step of one function."""
    asyncio.run(_stateless(world, rank, version))


async def _stateless(world: World, rank: int, version: int) -> None:
    objects = opened(world)
    batch = await _minibatch(objects, world, rank + version * world.workers)
    weights = await _model(objects, version, time.time() + 60)
    await _store(objects, world, gradient_key(rank, version), batch, weights)


def lasting(world: World, rank: int) -> int:
    """Steps until the time is up. Returns how many."""
    return asyncio.run(_lasting(world, rank))


async def _lasting(world: World, rank: int) -> int:
    objects, steps, pending = opened(world), 0, set[asyncio.Task[None]]()
    store = await SparseStore.connect(world.store, os.environ[TOKEN_VARIABLE]) if world.store else None
    try:
        async for batch in _minibatches(objects, world, rank):
            if time.time() >= world.ends_at:
                break
            if store is not None:
                weights = (await store.read(WEIGHTS))[:, 0]
                rows, gradient = _gradient(world, batch, weights)
                await store.push(WEIGHTS, rows, gradient)
            else:
                weights = await _model(objects, None if world.asynchronous else steps, world.ends_at)
                task = asyncio.create_task(_store(objects, world, gradient_key(rank, steps), batch, weights))
                pending.add(task)
                if not world.asynchronous or len(pending) > _AHEAD:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
            steps += 1
    except ChannelError:
        if time.time() < world.ends_at:
            raise
    finally:
        await asyncio.gather(*pending)
        if store is not None:
            await store.close()
    return steps


async def _minibatches(objects: Channel, world: World, rank: int) -> AsyncIterator[Batch]:
    """Minibatches of a function, by turns."""
    numbers = itertools.count(rank, world.workers)
    ahead = [asyncio.create_task(_minibatch(objects, world, next(numbers))) for _ in range(_AHEAD if world.prefetch else 0)]
    try:
        while True:
            ahead.append(asyncio.create_task(_minibatch(objects, world, next(numbers))))
            yield await ahead.pop(0)
    finally:
        for task in ahead:
            task.cancel()


async def _minibatch(objects: Channel, world: World, number: int) -> Batch:
    data = await objects.fetch(f"batch/{number % world.batches}")
    assert data is not None
    arrays, _ = decode_state(data)
    return Batch(arrays["indptr"], arrays["indices"], arrays["values"], arrays["labels"])


async def _model(objects: Channel, version: int | None, ends_at: float) -> np.ndarray:
    deadline = asyncio.get_running_loop().time() + ends_at - time.time()
    received = await objects.get(model_key(version), deadline=deadline)
    return np.frombuffer(received.data, np.float32)


def _gradient(world: World, batch: Batch, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a minibatch, and their gradient."""
    model = LogisticRegression(features=world.features)
    rows = model.rows(batch)
    values = {WEIGHTS: weights[rows[WEIGHTS], None]}
    return rows[WEIGHTS], model.step(batch, rows, values).gradients[WEIGHTS][:, 0]


async def _store(objects: Channel, world: World, key: str, batch: Batch, weights: np.ndarray) -> None:
    rows, gradient = _gradient(world, batch, weights)
    await objects.put(key, [encode_state({"rows": rows, "gradient": gradient}, {})])
