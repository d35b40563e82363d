"""Stores of real processes, as their operator starts them; shards and clients that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from sparse_stores import on_loop

from ephemeron.cli.main import main
from ephemeron.sparse.store import SGD, BlockingSparseStore, SparseStore
from ephemeron.sparse.store.journal import JournalOptions
from ephemeron.sparse.store.processes import ShardProcesses
from ephemeron.sparse.store.shard import ShardOptions

TOKEN = "a token of tests"
ROWS = 5_000
COMMAND = [sys.executable, "-c", "from ephemeron.cli.main import main; main()", "serve", "sparse", "--json"]


@contextmanager
def command(*options: str) -> Iterator[tuple[list[str], list[int], subprocess.Popen[str]]]:
    """`ephemeron serve sparse`: its addresses, the processes of its shards, and its own."""
    process = subprocess.Popen(
        [*COMMAND, "--listen", "127.0.0.1:0", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EPHEMERON_SPARSE_TOKEN": TOKEN},
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield ready["addresses"], ready["pids"], process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(120)
        process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.slow
@on_loop
async def test_shards_that_are_killed_in_the_middle_of_pushes_lose_nothing_with_the_log(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with command("--shards", "2", "--store", tmp_path.as_uri(), "--log", "--log-interval-ms", "10") as (addresses, pids, _):
        stores = [await SparseStore.connect(addresses, TOKEN) for _ in range(3)]
        for store in stores:
            await store.create("w", ROWS, optimizer=SGD(learning_rate=1))
        total = np.zeros(ROWS)
        killed = list(pids)

        async def push(store: SparseStore) -> None:
            for number in range(600):
                rows = rng.choice(ROWS, 30, replace=False)
                gradient = rng.integers(-3, 4, 30)
                total[rows] -= gradient
                await store.push("w", rows, gradient)
                if number % 20 == 0:
                    await store.multi_get("w", rows)

        async def kill() -> None:
            while killed:
                await asyncio.sleep(0.05)
                os.kill(killed.pop(), signal.SIGKILL)

        await asyncio.gather(kill(), *(push(store) for store in stores))
        for store in stores:
            await store.flush()
        np.testing.assert_array_equal((await stores[0].read("w")).ravel(), total)
        assert sum(store.reconnects for store in stores) >= 2
        for store in stores:
            await store.close()


@pytest.mark.slow
@on_loop
async def test_a_frozen_shard_is_killed_and_started_again(tmp_path: Path) -> None:
    options = ShardOptions(journal=JournalOptions(log=True, log_interval_s=0.01))
    processes = ShardProcesses([options], token=TOKEN, channel=tmp_path.as_uri(), frozen_s=3.0)
    processes._frozen_s = 60.0
    async with await SparseStore.connect(await processes.start(), TOKEN) as store:
        await store.create("w", 10, optimizer=SGD(learning_rate=1))
        processes._frozen_s, seen, frozen = 3.0, processes.reports[0], processes.pids[0]
        while processes.reports[0] is seen:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        os.kill(frozen, signal.SIGSTOP)
        pushing = asyncio.create_task(store.push("w", [1], [-1]))
        while processes.pids[0] == frozen:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        processes._frozen_s = 60.0  # a slow one is not frozen
        await pushing
        assert (await store.multi_get("w", [1])).item() == 1
        assert processes.restarts == 1
    await processes.close()
    assert processes.traffic.puts > 2  # claims of both, and the log
    assert processes.traffic.polls > 0


def last_snapshot(folder: Path) -> int:
    """Number of the last snapshot that is whole; -1: none is."""
    heads = (re.search(r"snapshot-\d+-(\d+)$", path.name) for path in folder.rglob("*"))
    return max((int(head[1]) for head in heads if head), default=-1)


@pytest.mark.slow
def test_a_killed_shard_with_snapshots_alone_loses_at_most_the_window(tmp_path: Path) -> None:
    with command("--store", tmp_path.as_uri(), "--snapshot-s", "0.2") as (addresses, pids, _):
        with BlockingSparseStore.connect(addresses, TOKEN) as store:
            store.create("w", 1, optimizer=SGD(learning_rate=1))
            end, number, acknowledged, snapshot = time.monotonic() + 120, 0, 0, sys.maxsize - 2
            while last_snapshot(tmp_path) < snapshot + 2:
                assert time.monotonic() < end, "no snapshot is written"
                number += 1
                store.push("w", [0], [-1])
                store.flush()
                if number == 20:  # one snapshot may be under way already; the next one begins later
                    acknowledged, snapshot = number, last_snapshot(tmp_path)
            os.kill(pids[0], signal.SIGKILL)
            kept = int(store.multi_get("w", [0]).item())
        assert acknowledged <= kept <= number


@pytest.mark.slow
def test_a_client_that_is_killed_leaves_whole_pushes(tmp_path: Path) -> None:
    """What arrives of a push is all of it: each shard has the rows of the same number of pushes, or of the last one not."""
    script = """
import sys
from ephemeron.sparse.store import BlockingSparseStore, Sum
import numpy as np
store = BlockingSparseStore.connect(sys.argv[2:], sys.argv[1])
store.create("w", 3000, optimizer=Sum())
print("ready", flush=True)
while True:
    store.push("w", np.arange(3000), np.ones(3000))
"""
    with command("--shards", "2") as (addresses, _, __):
        client = subprocess.Popen([sys.executable, "-c", script, TOKEN, *addresses], stdout=subprocess.PIPE)
        assert client.stdout is not None
        client.stdout.readline()
        with BlockingSparseStore.connect(addresses, TOKEN) as store:
            while store.multi_get("w", [0]).item() < 50:
                pass
            client.kill()
            client.wait()
            client.stdout.close()
            while store.status()[0].connections > 1:  # the last bytes of the dead client
                pass
            rows = store.read("w").ravel()
        assert len(set(rows[:1500])) == len(set(rows[1500:])) == 1
        assert abs(rows[0] - rows[-1]) * 3000 * 8 <= 64 << 20


@pytest.mark.slow
def test_a_store_that_is_ended_continues_when_it_is_started_again(tmp_path: Path) -> None:
    for turn in range(2):
        with command("--shards", "2", "--store", tmp_path.as_uri()) as (addresses, _, process):
            with BlockingSparseStore.connect(addresses, TOKEN) as store:
                store.create("w", 10, optimizer=SGD(learning_rate=1))
                assert store.read("w").ravel().tolist() == [turn] * 10
                store.push("w", range(10), [-1] * 10)
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["restarts"] == 0
            assert process.wait(120) == 0
    refused = invoke("--listen", "127.0.0.1:0", "--store", tmp_path.as_uri())
    assert refused.exit_code == 2
    assert "has 2 shards, not 1; start it with the same number" in refused.output


@pytest.mark.slow
def test_an_occupied_port_is_one_line() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "--listen", f"127.0.0.1:{port}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "EPHEMERON_SPARSE_TOKEN": TOKEN},
        )
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: cannot listen at 127.0.0.1:{port}: Address already in use; give another address"


@pytest.mark.slow
def test_without_a_place_the_state_is_lost_with_a_shard_and_the_command_says_so() -> None:
    with command() as (_, pids, process):
        os.kill(pids[0], signal.SIGKILL)
        assert process.wait(120) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--listen", "7080"], "is no address; give HOST:PORT"),
        (["--listen", "0.0.0.0:7080"], "can be reached from other machines; add --allow-remote"),
        (["--log"], "--log has no place; give --store URL"),
        (["--name", "a b"], "--name 'a b' is no name"),
    ],
)
def test_mistakes(options: list[str], text: str) -> None:
    refused = invoke(*options)
    assert refused.exit_code == 2
    assert text in refused.output


def test_without_a_token_nothing_starts() -> None:
    refused = invoke(token=None)
    assert refused.exit_code == 2
    assert "has no token; give --token-file FILE, or set EPHEMERON_SPARSE_TOKEN" in refused.output


def invoke(*options: str, token: str | None = TOKEN) -> Result:
    return CliRunner().invoke(main, ["serve", "sparse", *options], env={"EPHEMERON_SPARSE_TOKEN": token})
