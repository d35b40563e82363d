"""Objects that a store has damaged, truncated, replaced or lost, one kind of key at a time, and what killed clients leave."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import chaos_damage
from benchmarks.adversity_cases import case
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.durable_put import create_durable
from ephemeron.communication.keys import is_put_again
from ephemeron.communication.object_frame import Framed
from ephemeron.errors import DamagedObject
from ephemeron.functions import simulation
from ephemeron.runs.function_set import LossBudget
from ephemeron.testing.damage import DAMAGES, Damage

READ, MAP, LOG, RUN, LEFT = (
    "a read has three outcomes",
    "a damaged or lost object of a map's queue",
    "a damaged or lost object of the sparse store",
    "a damaged or lost object of a training run",
    "what killed clients and functions leave",
)
MAP_KINDS = ("work/#-#-#", "log/#-#-#.#", "edge/r#-#-#", "data/t#.#-i#", "in/#", "out/t#", "lost/r#-#-#", "work/closed")
RUN_KINDS = (
    ("elastic", "begin/#"),
    ("elastic", "generation/#"),
    ("bsp", "state/#/#"),
    ("bsp", "g#/#.m.#"),
    ("bsp", "g#/#.c.#.#"),
    ("asp", "g#/#.m.#"),
    ("direct", "claim/#/#"),
    ("server", "g#/#.m.#"),
    ("bsp", "spec"),
    ("bsp", "result"),
)


def _check(verdict: tuple[list[str], dict[str, int]]) -> None:
    assert not verdict[0], verdict[0]


def _add_reads(key: str, damage: Damage) -> None:
    @case(READ, f"{damage.__name__}: {key}")
    def read() -> None:
        async def go() -> str:
            store = MemoryChannel()
            channel = Framed(store, owner="a")
            await channel.put(f"{key}0", [b"other"])
            await channel.put(key, [b"whole"])
            found = damage(key, store.objects.pop(key), store.objects)
            if found is not None:
                store.objects[key] = found
            try:
                return "absent" if await channel.fetch(key) is None else "present"
            except DamagedObject as e:
                return f"damaged {e.key}"

        wanted = "absent" if is_put_again(key) or damage.__name__ == "removed" else f"damaged {key}"
        assert simulation.run(go()) == wanted


def _add_map(kind: str, damage: Damage, late: bool) -> None:
    @case(MAP, f"{damage.__name__}{' later' if late else ''}: {kind}")
    def mapped() -> None:
        _check(chaos_damage.tried("map", lambda key: chaos_damage.short(key) == kind, damage, late=late))


def _add_run(shape: str, kind: str, damage: Damage, late: bool) -> None:
    @case(RUN, f"{damage.__name__}{' later' if late else ''}: {kind}, {shape}")
    def trained() -> None:
        _check(chaos_damage.tried(shape, lambda key: chaos_damage.short(key) == kind, damage, late=late))


def _add_log(number: int, damage: Damage) -> None:
    @case(LOG, f"{damage.__name__}, {number}")
    def restarted() -> None:
        _check(chaos_damage.tried_log(random.Random(number), damage))


for _damage in DAMAGES:
    for _key in (
        "run/begin/1",
        "run/generation/000001",
        "run/groups/far/0.0000001",
        "run/region/000000005",
        "queue.work/00000000-ab-3",
        "store/shard-0000/log-00000001-0000000015",
        "run/state/0/3",
        "run/g0/1.c.0.1",
    ):
        _add_reads(_key, _damage)
    for _number in range(5):
        _add_log(_number, _damage)
    for _late in (False, True):
        for _kind in MAP_KINDS:
            _add_map(_kind, _damage, _late)
        for _shape, _kind in RUN_KINDS:
            if _damage.__name__ in ("flipped", "removed") or not (_late or _shape == "elastic"):
                _add_run(_shape, _kind, _damage, _late)


@case(READ, "an object that all writers put alike is put over a damaged one, another is not")
def put_again() -> None:
    async def go() -> None:
        store = MemoryChannel()
        channel = Framed(store, owner="a")
        store.objects["q.work/a"] = store.objects["q.log/a"] = b"damaged"
        assert bytes(await create_durable(channel, "q.work/a", b"tasks", alike=True)) == b"tasks"
        with contextlib.suppress(DamagedObject):
            await create_durable(channel, "q.log/a", b"results")
            raise AssertionError("a result was replaced")

    simulation.run(go())


@case(READ, "functions that end without progress use up one budget, whatever they end with")
def budget() -> None:
    rows: list[Callable[[LossBudget], bool]] = [lambda b: b.ended("lost"), lambda b: b.ended("idle"), lambda b: b.ended("its time was up")]
    spent = LossBudget(3)
    assert not any(row(spent) for row in rows)
    assert spent.ended("lost")
    spent.progressed(1)
    assert not spent.ended("lost")


@case(LEFT, "objects of a killed client in another folder are listed with their sizes, and removed")
def remains() -> None:
    from ephemeron.executor.remains import find_remains, remove_remains
    from ephemeron.runs import folders

    async def go(home: Path) -> None:
        folder, address = folders.create("map-1", home / "runs"), (home / "store").as_uri()
        folder.write("run.json", {"run_id": "map-1", "kind": "tasks", "platform": "local", "channel": address, "ends_with_client": True})
        (folder.path / "driver.lock").touch()
        async with open_channel(address) as store:
            await store.put("map-1.work/a", [b"12345"])
            (home / "store" / "map-1.work" / "b#1").write_bytes(b"begun")
            (found,) = await find_remains(home / "runs")
            assert (len(found.keys), found.nbytes, found.resumable) == (1, 5, False)
            await remove_remains(home / "runs")
            assert await store.list("") == []
        assert not list((home / "store" / "map-1.work").iterdir())
        assert (folder.read("result.json") or {})["status"] == "interrupted"

    with tempfile.TemporaryDirectory() as home:
        asyncio.run(go(Path(home)))
