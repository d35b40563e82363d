"""`clean`: what abandoned programs have left is found and removed; programs that run are left alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.communication.channels import open_channel
from ephemeron.config.typed import plain
from ephemeron.errors import JobError
from ephemeron.functions.tasks.model import TaskSpec
from ephemeron.functions.tasks.open_queue import open_queue
from ephemeron.linalg import clean
from ephemeron.linalg.execution.claims import ProgramClaim
from ephemeron.linalg.execution.remains import find_remains
from ephemeron.linalg.matrices import tile_store

PROGRAM = "cholesky-0123456789abcdef"
TILES = {
    f"{PROGRAM}-temporary/S/1.1.1",
    f"{PROGRAM}-temporary/S/1.2.1",
    f"{PROGRAM}-L/0.0",
    "lu-0123456789abcdef-U/0.0",
    "lu-0123456789abcdef-U/matrix.json",
    "matrix-0123456789abcdef/0.0",
    "mine-L/0.0",
}
DEAD = ProgramClaim(
    queue="map-1", channel="", host=platform.node(), process=os.getpid(), process_began=1.0, began=2.0
)  # another process had this number then


@pytest.fixture(params=["folder", "cache"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store of matrices in which the client's queue is, too, with two functions of which one has a task."""
    address = (tmp_path / "store").as_uri()
    if request.param == "cache":
        address = request.getfixturevalue("valkey_server").address[:-1] + "6"
    put(address, DEAD)
    asyncio.run(_fill(address))
    yield address
    asyncio.run(_empty(address))


async def _fill(address: str) -> None:
    async with tile_store.opened(address) as channel:
        for key in TILES:
            await channel.put(key, [b"x"])
    async with open_channel(address) as channel:
        queue = open_queue(channel, "map-1", owner="f", adapter=adapter(address), lease_s=0.1)  # type: ignore[arg-type]
        await queue.publish([TaskSpec(id="t", function="f")])
        await queue.announce("0-f")
        assert await queue.take(1)
        await queue.count("read-g0", "t", 1)


async def _empty(address: str) -> None:
    async with open_channel(address) as channel:
        await channel.delete(await channel.list(""))


def adapter(address: str) -> str:
    return "redis" if address.startswith("redis") else "objects"


def put(address: str, claim: ProgramClaim) -> None:
    async def go() -> None:
        async with tile_store.opened(address) as channel:
            key = f"{PROGRAM}-temporary/running.{claim.queue}"
            await channel.put(key, [json.dumps(plain(dataclasses.replace(claim, channel=claim.channel or address))).encode()])

    asyncio.run(go())


def keys(address: str) -> set[str]:
    async def go() -> set[str]:
        async with open_channel(address) as channel:
            return set(await channel.list(""))

    return asyncio.run(go())


def left_alone(address: str, says: str) -> None:
    """Nothing is removed, with the reason."""
    before = keys(address)
    [found] = clean(address, dry_run=False, lease_s=0.2)
    assert says in found.running
    with pytest.raises(JobError, match=f"{PROGRAM} runs: .*; end it first"):
        clean(address, PROGRAM, dry_run=False, lease_s=0.2)
    assert keys(address) >= TILES
    assert {key for key in before - keys(address) if ".work/" not in key} == set()


def test_what_an_abandoned_program_has_left_is_removed(store: str) -> None:
    async def when_the_lease_has_expired() -> None:  # a cache tells it by its clock, objects when they are observed
        while (await find_remains(store, lease_s=0.2))[0].running:
            pass

    asyncio.run(when_the_lease_has_expired())
    [found] = clean(store, lease_s=0.2)
    assert (found.program, found.temporary, found.unfinished) == (PROGRAM, 2, 1)
    assert found.queued >= 3
    assert keys(store) > TILES, "a dry run removes nothing"
    clean(store, PROGRAM, dry_run=False, lease_s=0.2)
    assert keys(store) == {key for key in TILES if "temporary" not in key}, "a later run goes on from unfinished results"
    [found] = clean(store, dry_run=False, results=True, lease_s=0.2)
    assert (found.temporary, found.queued, found.unfinished) == (0, 0, 1)
    assert keys(store) == {key for key in TILES if PROGRAM not in key}
    assert clean(store) == []


def test_a_program_that_runs_is_left_alone(store: str) -> None:
    async def beating() -> str:
        async with open_channel(store) as channel:
            queue = open_queue(channel, "map-1", owner="g", adapter=adapter(store), lease_s=1.0)  # type: ignore[arg-type]

            async def beat() -> None:
                while True:
                    await queue.announce("1-g")
                    await asyncio.sleep(0.01)

            beats = asyncio.create_task(beat())
            [found] = await find_remains(store, lease_s=0.5)
            beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beats
            await queue.announce("1-g", gone=True)
            return found.running

    assert re.match(r"[12] functions are at queue map-1", asyncio.run(beating()))


def test_a_client_that_waits_is_left_alone(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    asyncio.run(_fill(store))
    began, queue = psutil.Process().create_time(), (tmp_path / "no").as_uri()
    alive = dataclasses.replace(DEAD, process=os.getpid(), process_began=began, channel=queue)
    put(store, alive)
    left_alone(store, f"process {os.getpid()} of this machine waits for it")
    put(store, dataclasses.replace(alive, failed=True, channel=""))
    [found] = clean(store, lease_s=0.2)
    assert (found.running, found.queued) == ("", 0), "its executor may be open, with code in the queue's objects"
    put(store, dataclasses.replace(DEAD, host="elsewhere", channel="file:///tmp/queue"))
    left_alone(store, "its queue is on the machine elsewhere")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = (tmp_path / "store").as_uri()
    asyncio.run(_fill(store))
    put(store, dataclasses.replace(DEAD, channel=(tmp_path / "gone").as_uri()))

    def run(*arguments: str, say: str = "") -> tuple[int, str]:
        done = CliRunner().invoke(main, ["linalg", "clean", *arguments], input=say)
        return done.exit_code, done.output

    code, output = run(store, say="n\n")
    assert code == 1
    assert f"{PROGRAM}: 2 temporary tiles, 1 tile of unfinished results, 0 objects of queues" in output
    assert keys(store) > TILES
    code, output = run(store, "--json")
    assert (code, json.loads(output)["temporary"]) == (0, 2)
    assert run(store, "qr-0123456789abcdef")[0] == 2
    assert run(store, PROGRAM, "--yes", "--results")[0] == 0
    assert not [key for key in keys(store) if PROGRAM in key]
    assert run(store) == (0, f"no program has left anything in {store}\n")
    code, output = run(f"{store}-of-another-name")
    assert (code, "there is no folder" in output) == (2, True)
    assert not (tmp_path / "store-of-another-name").exists()


def test_a_damaged_claim_holds_nothing_back(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    asyncio.run(_fill(store))
    put(store, dataclasses.replace(DEAD, channel=(tmp_path / "gone").as_uri()))
    [claim] = (tmp_path / "store").glob(f"{PROGRAM}-temporary/running*")
    claim.write_bytes(claim.read_bytes()[:-3])
    [found] = [each for each in clean(store, dry_run=False, results=True) if each.program == PROGRAM]
    assert (found.claims, found.running) == ((), "")
    assert not [key for key in keys(store) if PROGRAM in key]
