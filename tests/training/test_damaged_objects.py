"""Whatever happens to any object of a run: the weights of an undisturbed run, or an error that names the key."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from training_runs import WORLD, configuration, make_job

from ephemeron.communication.keys import Keys
from ephemeron.errors import ChannelError
from ephemeron.functions import simulation
from ephemeron.functions.base import Limits
from ephemeron.functions.simulated import SimulatedPlatform
from ephemeron.prices import load_prices
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.job import Target
from ephemeron.training.job.generation import ScheduledResize
from ephemeron.training.tensors import digest
from ephemeron.training.worker.spec import RunSpec

Store = dict[str, bytes]
"""Every object that was ever put, by key, in the order of puts."""
Damage = Callable[[str, bytes, Store, random.Random], bytes | None]
"""What is found instead of an object; None: there is nothing of that kind to put in its place."""

CHANGES = (ScheduledResize(from_epoch=1, workers=2), ScheduledResize(from_epoch=2, workers=4))
SHAPES: dict[str, dict[str, Any]] = {
    "bsp": {"workers": 3, "aggregators": 2, "sync": "bsp", "function_timeout_s": 8.0},
    "hap": {"workers": 3, "aggregators": 2, "sync": "hap", "pattern": "pipelined"},
    "server": {"workers": 3, "pattern": "parameter-server", "sync": "bsp"},
    "direct": {"workers": 3, "aggregators": 2, "sync": "bsp", "channel": "direct", "function_timeout_s": 100.0},
    "elastic": {"workers": 3, "aggregators": 2, "sync": "bsp", "resize": {"schedule": CHANGES}},
    "elastic direct": {"workers": 3, "aggregators": 2, "sync": "hap", "channel": "direct", "resize": {"schedule": CHANGES}},
    "asp": {"workers": 3, "aggregators": 2, "sync": "asp"},
    "ssp": {"workers": 3, "aggregators": 2, "sync": "ssp:2", "pattern": "pipelined"},
    "hsp": {"workers": 3, "aggregators": 2, "sync": "hsp"},
    "server asp": {"workers": 3, "pattern": "parameter-server", "sync": "asp"},
}
ASYNCHRONOUS = ("asp", "ssp", "hsp", "server asp")
"""Shapes in which contributions are counted, since weights depend on timing."""


def flipped(key: str, data: bytes, seen: Store, rng: random.Random) -> bytes:
    """One bit is another one."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut_short(key: str, data: bytes, seen: Store, rng: random.Random) -> bytes:
    """The end is missing."""
    return data[: rng.randrange(len(data))]


def _parts(key: str) -> list[str]:
    return key.replace(".", "/").split("/")


def _kind(key: str) -> tuple[str, ...]:
    return tuple(part for part in _parts(key) if not part.isdigit())


def removed(key: str, data: bytes, seen: Store, rng: random.Random) -> bytes:
    """The put was acknowledged, and nothing is there."""
    return GONE


def another(key: str, data: bytes, seen: Store, rng: random.Random) -> bytes | None:
    """An object of the same kind that was put under another key: an older iteration, another rank or another shard."""
    others = [k for k in seen if k != key and _kind(k) == _kind(key) and seen[k] != data]
    return seen[rng.choice(others)] if others else None


def older(key: str, data: bytes, seen: Store, rng: random.Random) -> bytes | None:
    """What was put last under another key that differs in one number alone."""
    others = [
        k for k in seen if len(_parts(k)) == len(_parts(key)) and sum(a != b for a, b in zip(_parts(k), _parts(key), strict=True)) == 1
    ]
    same = [k for k in others if _kind(k) == _kind(key) and seen[k] != data]
    return seen[same[-1]] if same else None


def of_another_run(key: str, data: bytes, seen: Store, rng: random.Random) -> bytes | None:
    """The object of the same name from a run with other data."""
    return STRANGERS.get(key.replace("run/", "other/", 1))


GONE = b"gone"
STRANGERS: Store = {}
DAMAGES: tuple[Damage, ...] = (flipped, cut_short, removed, another, older, of_another_run)


def execute(
    shape: str, *, run_id: str = "run", seed: int = 1, target: str = "", damage: Damage | None = None, when: str = "put"
) -> tuple[str, str, Store]:
    """A run in virtual time, whose object `target` is damaged.

    Args:
        when: `put`: the store keeps a damaged object. `later`: it is damaged once it has been read. `read`: only the first read is wrong.

    Returns:
        The weights that the client got, why there are none, and every object that was put.
    """
    spec = RunSpec(
        run_id=run_id,
        model=Target(target="none"),
        loss=Target(target="none"),
        optimizer=Target(target="none"),
        configuration=configuration(checkpoint_every=2, **SHAPES[shape]),
        epochs=3 if "resize" in SHAPES[shape] else 1,
        seed=seed,
        dtype="float32",
        samples=48 * (3 if "resize" in SHAPES[shape] else 8),
        prices=load_prices("objects"),
        trainer="counting" if shape in ASYNCHRONOUS else "synthetic",
        trainer_options={} if shape in ASYNCHRONOUS else {"elements": 24},
        cold_start_s=WORLD.cold_start_s,
    )
    seen: Store = {}
    rng = random.Random(f"{shape}/{target}/{damage.__name__ if damage else ''}")

    async def go() -> tuple[str, str]:
        platform = SimulatedPlatform(WORLD, seed=1, limits=Limits())
        store = platform.store
        publish, fetch, get = store.publish, store.fetch, store.get
        once: dict[str, bytes] = {}

        def damaging(key: str, data: bytes) -> None:
            first = key not in seen
            found = damage(key, bytes(data), seen, rng) if damage and first and key == target else None
            seen[key] = bytes(data)
            if found is not None and when != "put":
                once[key] = found
                found = None
            if found is not GONE:
                publish(key, data if found is None else found)

        def read(key: str, data: memoryview) -> memoryview | None:
            if key not in once:
                return data
            found = once.pop(key)
            if when == "read":
                return None if found is GONE else memoryview(found)
            del store.objects[key]
            if found is not GONE:
                store.objects[key] = found
            return data

        async def fetching(key: str) -> memoryview | None:
            data = await fetch(key)
            return None if data is None else read(key, data)

        async def getting(key: str, *, deadline: float, expected_at: float | None = None):
            got = await get(key, deadline=deadline)
            return got._replace(data=read(key, got.data) or got.data)

        store.publish, store.fetch, store.get = damaging, fetching, getting
        trigger = RunDriver(platform, store, spec, channel_address="memory", clock=asyncio.get_running_loop().time)
        prepared = Prepared(job=make_job(), spec=spec, objects={Keys(run_id).spec: [spec.to_bytes()]}, model_bytes=0)
        try:
            await trigger.launch(prepared)
            ending = await asyncio.wait_for(trigger.watch(), 300_000)
        except (ChannelError, TimeoutError) as e:
            return "", f"{type(e).__name__}: {e}"
        if ending.status != "finished":
            return "", "; ".join(ending.causes)
        assert ending.arrays is not None
        assert ending.final is not None
        return f"{digest(ending.arrays)} {ending.final.weights_sha256} {ending.final.iterations}", ""

    return *simulation.run(go()), seen


def trials(shape: str, seen: Store) -> Iterator[tuple[str, Damage, str]]:
    for key in seen:
        for damage in DAMAGES:
            yield key, damage, "put"
        for damage in (flipped, removed):
            yield key, damage, "later"
        yield key, flipped, "read"


@pytest.fixture(scope="module", autouse=True)
def strangers():
    for shape in SHAPES:
        STRANGERS.update(execute(shape, run_id="other", seed=2)[2])
    yield
    STRANGERS.clear()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [pytest.param(s, marks=[] if s == "bsp" else pytest.mark.slow) for s in SHAPES])
def test_a_damaged_object_changes_no_weight(shape):
    whole, _, seen = execute(shape)
    assert whole
    chosen = random.Random(5).sample(list(trials(shape, seen)), 24)
    assert survivors(shape, chosen, whole) > len(chosen) / 3


@pytest.mark.parametrize("key", ["run/begin/1", "run/generation/000001"])
def test_what_a_generation_begins_with_is_put_again_or_named(key):
    """Nobody but rank 0 puts it: functions were started for it for ever."""
    whole, _, seen = execute("elastic")
    assert key in seen
    chosen = [trial for trial in trials("elastic", seen) if trial[0] == key]
    assert survivors("elastic", chosen, whole) >= 6, "what rank 0 reads back is put again"


def survivors(shape: str, chosen: list[tuple[str, Damage, str]], whole: str) -> int:
    """Number of trials that end with the weights of an undisturbed run. All others name the key."""
    wrong, survived = [], 0
    for key, damage, when in chosen:
        got, why, _ = execute(shape, target=key, damage=damage, when=when)
        survived += got == whole
        if got != whole and (got or key not in why):
            wrong.append((key, damage.__name__, when, got, why))
    assert not wrong, f"{len(wrong)} of {len(chosen)}, for example {wrong[:3]}"
    return survived
