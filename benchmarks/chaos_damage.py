"""One object of a run damaged, truncated, replaced by another or lost: the run ends, right or with an error that names the key.

A schedule is a function of its seed: a product, a kind of key, what happens to the first object of that kind, and when: as it is put, or once
it has been read whole, so that the writer that reads it back does not notice. Simulated ones are training over a store and direct connections,
with and without changes of the functions, in every protocol; two regions; maps with trees; and restarts of the sparse store. Live ones are training and maps
on processes of this machine, through a folder and a cache. What is wrong begins with `endless`, `silent` (another result) or `unnamed`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import chaos_live
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.keys import Keys
from ephemeron.errors import EphemeronError
from ephemeron.functions import simulation
from ephemeron.functions.base import Limits
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.prices import load_prices
from ephemeron.testing.damage import DAMAGES, Damage, damage_first, kind_of
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.job import Configuration, DataSpec, Job, RunRegion, Simulation, Target
from ephemeron.training.job.generation import ScheduledResize
from ephemeron.training.tensors import digest
from ephemeron.training.worker.spec import RunSpec

MOST_S = 300_000.0
"""Virtual seconds after which a run counts as endless."""
LIVE_LIMIT_S = 150.0
WORLD = Simulation(compute={"a": 50.0, "b": 4.0, "m": 0.0})
CHANGES = (ScheduledResize(from_epoch=1, workers=2), ScheduledResize(from_epoch=2, workers=4))
SHAPES: dict[str, dict[str, Any]] = {
    "bsp": {"function_timeout_s": 8.0},
    "hap": {"sync": "hap", "pattern": "pipelined"},
    "server": {"pattern": "parameter-server", "channel": "parameter_server", "aggregators": 1},
    "server asp": {"pattern": "parameter-server", "channel": "parameter_server", "sync": "asp", "aggregators": 1},
    "direct": {"channel": "direct", "function_timeout_s": 100.0},
    "elastic": {"resize": {"schedule": CHANGES}},
    "elastic direct": {"channel": "direct", "sync": "hap", "resize": {"schedule": CHANGES}},
    "asp": {"sync": "asp"},
    "ssp": {"sync": "ssp:2", "pattern": "pipelined"},
    "hsp": {"sync": "hsp"},
}
PRODUCTS = (*SHAPES, "map", "map", "map", "sparse log", "regions")

Wanted = Callable[[str], bool]
Ended = tuple[str, str]
"""Digest of what came out, and why nothing did."""


def _nothing(key: str) -> bool:
    return False


def short(key: str) -> str:
    """Kind of a key, without the run's name."""
    at = min((key.index(c) for c in "./" if c in key), default=-1)
    return kind_of(key[at + 1 :])


class _Watched:
    """Damage to one object of memory channels, and all keys that were put."""

    def __init__(self, wanted: Wanted, damage: Damage, *, late: bool) -> None:
        self._how = (wanted, damage, late)
        self.happened: list[str] = []
        self.keys: set[str] = set()

    def watch(self, store: MemoryChannel) -> None:
        wanted, damage, late = self._how
        damage_first(store, wanted, damage, self.happened, late=late)
        publish = store.publish

        def published(key: str, data: bytes) -> None:
            self.keys.add(key)
            if asyncio.get_running_loop().time() > MOST_S:
                raise KeyboardInterrupt  # which no part of a run catches
            publish(key, data)

        store.publish = published  # type: ignore[method-assign]

    @contextlib.contextmanager
    def everywhere(self) -> Iterator[None]:
        """Watches all channels in memory that are made meanwhile."""
        made = MemoryChannel.__init__

        def make(store: MemoryChannel) -> None:
            made(store)
            self.watch(store)

        MemoryChannel.__init__ = make  # type: ignore[method-assign]
        try:
            yield
        finally:
            MemoryChannel.__init__ = made  # type: ignore[method-assign]


# -- simulated -------------------------------------------------------------------------------------------


def _train(shape: str, watched: _Watched) -> Ended:
    values = {
        "platform": "simulated",
        "channel": "memory",
        "workers": 3,
        "aggregators": 2,
        "memory_mb": 1769,
        "checkpoint_every": 2,
        "batch_size": 16,
        "function_timeout_s": 900.0,
    }
    c = Configuration(**{**values, **SHAPES[shape]}).resolved()
    counts, elastic = c.sync.startswith(("asp", "ssp", "hsp")), "resize" in SHAPES[shape]
    spec = RunSpec(
        run_id="run",
        model=Target(target="none"),
        loss=Target(target="none"),
        optimizer=Target(target="none"),
        configuration=c,
        epochs=3 if elastic else 1,
        seed=1,
        dtype="float32",
        samples=48 * (3 if elastic else 8),
        prices=load_prices("objects"),
        trainer="counting" if counts else "synthetic",
        trainer_options={} if counts else {"elements": 24},
        cold_start_s=WORLD.cold_start_s,
    )

    async def go() -> Ended:
        platform = SimulatedPlatform(WORLD, seed=1, limits=Limits())
        store: Any = platform.store
        watched.watch(store)
        driver = RunDriver(platform, store, spec, channel_address="memory", clock=asyncio.get_running_loop().time)
        job = Job(name="chaos", model=Target(target="none"))
        await driver.launch(Prepared(job=job, spec=spec, objects={Keys("run").spec: [spec.to_bytes()]}, model_bytes=0))
        ending = await driver.watch()
        if ending.status != "finished" or ending.arrays is None:
            return "", "; ".join(ending.causes)
        return digest(ending.arrays), ""

    return simulation.run(go())


def _refuse(x: float) -> float:
    raise ValueError(f"no {x}")


def _map(**how: Any) -> Ended:
    from ephemeron.executor import FunctionExecutor

    found: list[Any] = []
    errors: list[str] = []
    with FunctionExecutor(**{"platform": "simulated", "max_workers": 2, "retries": 1, "progress": False, **how}) as pool:
        futures = [
            pool.submit(lambda a: float(a.sum()), np.arange(20_000.0)),
            pool.submit(np.zeros, 20_000),
            *(pool.submit(abs, -n) for n in range(40)),
            pool.map_reduce(abs, range(40), max, chunksize=4, fan_in=3),
            pool.map_reduce(_refuse, range(9), max, chunksize=3, fan_in=2),
        ]
        for future in futures:
            try:
                found.append(future.result(timeout=LIVE_LIMIT_S))
            except EphemeronError as e:
                found.append("none")
                if "ValueError: no" not in str(e):
                    errors.append(str(e))
            except TimeoutError:
                raise KeyboardInterrupt from None
    wanted: list[Any] = [np.arange(20_000.0).sum(), np.zeros(20_000), *range(40), 39, "none"]
    same = all(isinstance(got, str) or np.array_equal(got, want) for got, want in zip(found, wanted[: len(found)], strict=True))
    return ("whole" if same else "other", "") if not errors or not same else ("", "; ".join(errors))


def _regions() -> Ended:
    from ephemeron.training.driver import configure, train

    job = Job(
        name="chaos",
        model=Target(target="chaos_model:model"),
        optimizer=Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}),
        data=DataSpec(),
        epochs=1,
        code=(_code(),),
        simulation=dataclasses.replace(WORLD, compute={"a": 200.0, "b": 4.0, "m": 0.0}),
    )
    groups = (RunRegion(name="near", workers=2, batch_size=24), RunRegion(name="far", workers=1, batch_size=24))
    values: dict[str, Any] = {
        "platform": "simulated",
        "regions": {"region": groups, "exchange_every": 3, "sync": "diloco"},
        "checkpoint_every": 4,
    }
    result = train(job, configure(job, **values))
    return (str(result.summary.weights_sha256), "") if result.finished else ("", str(result))


@lru_cache(maxsize=1)
def _code() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="chaos-code-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "chaos_model.py").write_text(
        "from torch import nn\n\n\ndef model():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    return folder


@lru_cache(maxsize=1)
def _sparse_objects() -> dict[str, bytes]:
    """Objects of a sparse store with a log that was killed after 12 acknowledged pushes and one snapshot."""
    from ephemeron.sparse.store import SparseStore, Sum
    from ephemeron.sparse.store.journal import JournalOptions
    from ephemeron.sparse.store.places import Directory, framed
    from ephemeron.sparse.store.shard import Shard, ShardOptions

    async def go() -> dict[str, bytes]:
        channel, served = MemoryChannel(), asyncio.Event()
        journal = JournalOptions(log=True, log_interval_s=0.001, snapshot_s=3600, fence_s=60)
        shard = Shard(
            ShardOptions(shard=0, shards=1, journal=journal),
            token="chaos",
            channel=framed(channel, owner="shard"),
            ready=lambda host, port: served.set(),
        )
        task = asyncio.ensure_future(shard.run())
        await served.wait()
        store = await SparseStore.connect(Directory(framed(channel, owner="client"), "sparse-store").locate, "chaos")
        await store.create("w", 50, optimizer=Sum())
        for number in range(12):
            await store.push("w", np.arange(50), np.ones(50))
            await store.flush()
            if number == 3:
                await store.snapshot()
        await store.close(flush=False)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return dict(channel.objects)

    return asyncio.run(go())


def _sparse(rng: random.Random, damage: Damage) -> tuple[str, Ended]:
    from ephemeron.sparse.store.places import ShardPlace, framed
    from ephemeron.sparse.store.snapshot import recover

    objects = dict(_sparse_objects())
    keys = sorted(key for key in objects if "/attempt-" not in key)
    if damage.__name__ == "removed":  # of the last object only the clients know: tests/sparse/store/test_sparse_damage.py
        keys.remove(max(key for key in keys if "/log-" in key))
    key = rng.choice(keys)
    found = damage(key, objects.pop(key), _sparse_objects())
    if found is not None:
        objects[key] = found

    async def go() -> Ended:
        channel = MemoryChannel()
        channel.objects.update(objects)
        try:
            state = await recover(ShardPlace(framed(channel, owner="shard"), "sparse-store", 0), 0, 1)
        except EphemeronError as e:
            return "", str(e)
        total = float(sum(table.weights.sum() for table in state.tables))
        return "whole" if total == 600 and channel.objects == objects else f"sum {total}", ""

    return key, simulation.run(go())


@cache
def _undisturbed(product: str) -> tuple[str, tuple[str, ...]]:
    """What comes out, and all kinds of keys."""
    watched = _Watched(_nothing, DAMAGES[0], late=False)
    found, why = _ended(product, watched)
    assert found, f"{product}: {why}"
    return found, tuple(sorted({short(key) for key in watched.keys}))


def _ended(product: str, watched: _Watched) -> Ended:
    if product in SHAPES:
        return _train(product, watched)
    with watched.everywhere():
        return _regions() if product == "regions" else _map()


Verdict = tuple[list[str], dict[str, int]]
"""What is wrong (empty: nothing), and what happened how often."""


def run(seed: int) -> Verdict:
    """Runs the simulated schedule of a seed."""
    rng = random.Random(f"damage/{seed}")
    product, damage, late = rng.choice(PRODUCTS), rng.choice(DAMAGES), rng.random() < 0.5
    with tempfile.TemporaryDirectory(prefix="chaos-") as home:
        os.environ["EPHEMERON_HOME"] = home
        if product == "sparse log":
            return tried_log(rng, damage)
        kind = rng.choice(_undisturbed(product)[1])
        return tried(product, lambda key: short(key) == kind, damage, late=late)


def tried(product: str, wanted: Wanted, damage: Damage, *, late: bool) -> Verdict:
    """One product with the first wanted object damaged, in virtual time."""
    whole, watched = _undisturbed(product)[0], _Watched(wanted, damage, late=late)
    try:
        found, why = _ended(product, watched)
    except KeyboardInterrupt:
        return [f"endless: {product}, {damage.__name__}, late {late}, {watched.happened}"], {}
    except EphemeronError as e:
        found, why = "", str(e)
    key = watched.happened[0] if watched.happened else ""
    return _verdict(product, damage, late, key, whole, found, why)


def tried_log(rng: random.Random, damage: Damage) -> Verdict:
    """A restart of the sparse store with one object of its log or its snapshots damaged."""
    key, (found, why) = _sparse(rng, damage)
    return _verdict("sparse log", damage, True, key, "whole", found, why)


def _verdict(product: str, damage: Damage, late: bool, key: str, whole: str, found: str, why: str) -> Verdict:
    """What is wrong, and what happened. `whole` is empty where the result depends on timing."""
    said = f"{product}, {damage.__name__}{' later' if late else ''}, {key or 'nothing'}"
    if found and whole and found != whole:
        return [f"silent: {said}: {found[:60]}"], {}
    # Of a lost object that only the queue could tell, the queue is named.
    queue = key.partition(".")[0] if "." in key else key
    named = bool(key) and (key in why or (damage.__name__ == "removed" and queue in why) or key.partition("-part-")[0] in why)
    if not found and not named and not ("/snapshot-" in key and "/log-" in why):
        return [f"unnamed: {said}: {why[:200]}"], {}
    outcome = "nothing damaged" if not key else "right" if found else "named"
    return [], {outcome: 1, f"{product}": 1, damage.__name__: 1}


# -- live ------------------------------------------------------------------------------------------------

LIVE_KINDS = {
    "training": ("g#/#.c.#.#", "g#/#.m.#", "state/#/#", "claim/#/#", "start/#/#", "spec"),
    "map": ("work/#-#-#", "log/#-#-#.#", "data/t#.#-", "edge/", "in/#", "out/t#"),
}
"""Beginnings of kinds of keys."""


async def _damage_live(address: str, wanted: Wanted, damage: Damage, happened: list[str]) -> None:
    """Damages the first object that is found in a store of processes."""
    seen: dict[str, bytes] = {}
    async with open_channel(address) as channel:
        while not happened:
            with contextlib.suppress(EphemeronError):
                for key in await channel.list(""):
                    data = await channel.fetch(key)
                    if data is None:
                        continue
                    seen[key] = bytes(data)
                    if wanted(key) and not happened:
                        found = damage(key, seen[key], seen)
                        await (channel.delete([key]) if found is None else channel.put(key, [found]))
                        happened.append(key)
            await asyncio.sleep(0.005)


def _begins(kinds: tuple[str, ...], rng: random.Random) -> Wanted:
    kind = rng.choice(kinds)
    return lambda key: short(key).startswith(kind)


def run_live(seed: int, *, s3_port: int) -> Verdict:
    """Runs the live schedule of a seed, see `run`."""
    rng = random.Random(f"damage live/{seed}")
    product, damage = rng.choice(("training", "map")), rng.choice(DAMAGES)
    wanted, happened = _begins(LIVE_KINDS[product], rng), list[str]()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    os.environ["EPHEMERON_HOME"] = str(folder / "home")
    try:
        if product == "training":
            whole, (found, why) = asyncio.run(_train_live(seed, rng, folder, wanted, damage, happened))
        else:
            whole, (found, why) = "whole", _map_live(rng, folder, wanted, damage, happened)
    except (TimeoutError, KeyboardInterrupt):
        return [f"endless: {product}, {damage.__name__}, {happened}: not within {LIVE_LIMIT_S:g} s"], {}
    except EphemeronError as e:
        whole, found, why = "whole", "", str(e)
    finally:
        chaos_live.kill_left(folder)
        shutil.rmtree(folder, ignore_errors=True)
    return _verdict(product, damage, True, happened[0] if happened else "", whole, found, why)


async def _train_live(
    seed: int, rng: random.Random, folder: Path, wanted: Wanted, damage: Damage, happened: list[str]
) -> tuple[str, Ended]:
    s = dataclasses.replace(
        chaos_live.schedule_of(seed),
        channel=rng.choice(("folder", "valkey")),
        network_rate=0.0,
        pauses=(),
        restart_at=None,
        freezes=(),
        client_dies_at=None,
        daemon_dies_at=None,
        function_timeout_s=900.0,
        step_s=0.05,
        skew_s=0.0,
        faults=() if rng.random() < 0.5 else ("kill:rank=1,iteration=5,phase=upload",),
    )
    async with chaos_live.stores(s, folder, 0) as (address, proxy, servers):
        spec = chaos_live.spec_of(s, address)
        world = chaos_live.World(s, spec, folder, address, proxy, servers[0] if servers else None)
        damaging = asyncio.ensure_future(_damage_live(address, wanted, damage, happened))
        try:
            async with asyncio.timeout(LIVE_LIMIT_S):
                ending = await world.run()
        finally:
            damaging.cancel()
            await world.close()
        whole = await asyncio.to_thread(chaos_live.expected, spec)
        if ending.status != "finished" or ending.arrays is None:
            return whole, ("", "; ".join(ending.causes))
        return whole, (digest(ending.arrays), "")


def _map_live(rng: random.Random, folder: Path, wanted: Wanted, damage: Damage, happened: list[str]) -> Ended:
    address = (folder / "store").as_uri()

    def damages() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(damaging)

    loop = asyncio.new_event_loop()
    damaging = loop.create_task(_damage_live(address, wanted, damage, happened))
    thread = threading.Thread(target=damages, daemon=True)
    thread.start()
    try:
        return _map(platform="local", channel=address)
    finally:
        loop.call_soon_threadsafe(damaging.cancel)
        thread.join(10)
        loop.close()
