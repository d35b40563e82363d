"""The sparse store beside parameter servers on torch.distributed.rpc and on a Ray actor, and on our own RPC engines.

    python -m benchmarks.sparse_store [--parts sides,shards,bytes,hand_over] [--turns N] [--seconds S] [--clients C] [--json]


sides      median of a multi-get of 1,000 entries by one client alone, steps per second of all clients at once, and the CPU time of
           a step at server and clients; all sides in turns. Goals: 300 µs, and twice the steps per second of the peers.
shards     ours with 1, 2 and 4 shards, for requests of 1,000 and 50,000 entries. Where there are fewer cores than processes, it is the
           CPU time of the busiest shard that tells what a shard with a core of its own can do.
bytes      bytes on the connection of a step, by encoding.
hand_over  how long a step waits while a shard hands over, and while a killed one is started again with its log; and how long the
           snapshot of a table of 64 MB makes others wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import condensed, environment, write
from benchmarks.sparse_store_sides import ENTRIES, ENTRIES_VARIABLE, ROWS, SIDES, TOKEN, batches
from ephemeron.sparse.store import AdaGrad, Compression, SparseStore, Sum
from ephemeron.sparse.store.journal import JournalOptions
from ephemeron.sparse.store.processes import ShardProcesses
from ephemeron.sparse.store.shard import ShardOptions

PARTS = ("sides", "shards", "bytes", "hand_over")
_GETS = 1500
_ENDED_S = 30.0


class ProcessEnded(Exception):
    """An end of a side has ended before its time."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_store", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result: dict[str, Any] = environment()
    parts = args.parts.split(",")
    if "sides" in parts:
        result["sides"] = asyncio.run(sides(args.sides.split(","), args.turns, args.seconds, args.clients))
    if "shards" in parts:
        result["shards"] = asyncio.run(shards(args.turns, args.seconds, args.clients))
    if "bytes" in parts:
        result["bytes"] = asyncio.run(step_bytes())
    if "hand_over" in parts:
        result["hand_over"] = asyncio.run(hand_over())
    if args.json:
        write(result)
    else:
        show(result)


async def sides(names: list[str], turns: int, seconds: float, clients: int) -> dict[str, Any]:
    """All sides in turns."""
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            try:
                measured[name].append(await one(name, clients, seconds))
            except ProcessEnded as e:  # Ray's cluster does not always start on a busy machine
                print(f"turn {turn + 1}: {name}: {e}", file=sys.stderr)
                continue
            print(f"turn {turn + 1}: {name}: {measured[name][-1]}", file=sys.stderr)
    return {
        "clients": clients,
        **{name: {key: condensed([m[key] for m in rows]) for key in rows[0]} for name, rows in measured.items() if rows},
    }


async def shards(turns: int, seconds: float, clients: int) -> dict[str, Any]:
    """Ours with several shards, and small and large requests."""
    counts = [(count, entries) for entries in (1_000, 50_000) for count in (1, 2, 4)]
    measured: dict[str, list[dict[str, Any]]] = {f"{entries} entries, {count} shards": [] for count, entries in counts}
    for _ in range(turns):
        for (count, entries), rows in zip(counts, measured.values(), strict=True):
            rows.append(await one("ours", clients, seconds, count, entries))
            print(f"{entries} entries, {count} shards: {rows[-1]}", file=sys.stderr)
    return {name: {key: condensed([m[key] for m in rows]) for key in rows[0]} for name, rows in measured.items()}


async def one(side: str, clients: int, seconds: float, count: int = 1, entries: int = ENTRIES) -> dict[str, Any]:
    """One measurement: a fresh server, fresh clients."""
    processes: ShardProcesses | None = None
    with ExitStack() as stack:
        if side.startswith("ours"):
            processes = ShardProcesses([ShardOptions(shard=i, shards=count) for i in range(count)], token=TOKEN)
            where, pids = ",".join(await processes.start()), processes.pids
        else:
            server = _start(stack, "server", side, str(clients))
            ready = await _line(server)
            where, pids = ready["where"], [ready["pid"]]
        try:
            started = [_start(stack, "client", side, str(clients), str(i), where, entries=entries) for i in range(clients)]
            for client in started:
                await _line(client)
            latency = statistics.median(await _ask(started[0], f"gets {_GETS}"))
            before = [_cpu_s(pid) for pid in pids]
            done = await asyncio.gather(*(_ask(client, f"steps {seconds}") for client in started))
            cpu = [_cpu_s(pid) - b for pid, b in zip(pids, before, strict=True)]
        finally:
            if processes is not None:
                await processes.close()
    steps = sum(d["steps"] for d in done)
    return {
        "get_us": round(latency, 1),
        "steps_per_s": round(steps / statistics.mean(d["s"] for d in done), 1),
        "server_cpu_us": round(1e6 * sum(cpu) / steps, 1),
        "busiest_server_cpu_us": round(1e6 * max(cpu) / steps, 1),
        "client_cpu_us": round(1e6 * sum(d["cpu_s"] for d in done) / steps, 1),
    }


async def step_bytes() -> dict[str, Any]:
    """Bytes of a step on the connection, up and down, and the error of what arrives."""
    processes = ShardProcesses([ShardOptions()], token=TOKEN)
    addresses, found = await processes.start(), {}
    rows, gradient = batches(0)
    try:
        for name, values, compression in (
            ("float32", "float32", Compression()),
            ("float16", "float16", Compression(values="float16")),
            ("int8, reads float16", "float16", Compression(values="int8")),
            ("int8 of the largest tenth", "float16", Compression(values="int8", threshold=1.65)),
        ):
            async with await SparseStore.connect(addresses, TOKEN, values=values, compression=compression) as store:
                await store.create(name, ROWS, optimizer=Sum())
                up, down = store.bytes_up, store.bytes_down
                for batch in rows:
                    await store.multi_get(name, batch)
                    await store.push(name, batch, gradient)
                found[name] = {"up": round((store.bytes_up - up) / len(rows)), "down": round((store.bytes_down - down) / len(rows))}
        plain = 8 * ENTRIES + 8 * ENTRIES + 4 * ENTRIES
        return {"int64 and float32, without heads": {"up": plain, "down": 4 * ENTRIES}, **found}
    finally:
        await processes.close()


async def hand_over() -> dict[str, Any]:
    """Longest steps while a shard is replaced or stored."""
    with tempfile.TemporaryDirectory() as folder:
        journal = JournalOptions(snapshot_s=3600, log=True, log_interval_s=0.02)
        processes = ShardProcesses([ShardOptions(journal=journal)], token=TOKEN, channel=Path(folder).as_uri())
        addresses, rows = await processes.start(), batches(0)[0]
        total, longest = 0, 0.0

        async def step(store: SparseStore) -> None:
            nonlocal total, longest
            begun = time.perf_counter()
            await store.multi_get("w", rows[total % len(rows)])
            await store.push("w", rows[total % len(rows)], np.ones(ENTRIES))
            longest, total = max(longest, time.perf_counter() - begun), total + 1

        async def longest_step(store: SparseStore, during: Any) -> float:
            nonlocal longest
            longest = 0.0
            task = asyncio.ensure_future(during)
            while not task.done():
                await step(store)
            for _ in range(50):
                await step(store)
            return longest

        async def kill() -> None:
            await asyncio.sleep(0.1)
            restarts = processes.restarts
            os.kill(processes.pids[0], signal.SIGKILL)
            while True:
                if processes.restarts > restarts:
                    return
                await asyncio.sleep(0.01)

        try:
            async with await SparseStore.connect(addresses, TOKEN) as store:
                await store.create("w", ROWS, optimizer=Sum())
                quiet = [await longest_step(store, asyncio.sleep(0.5)) for _ in range(3)]
                killed = [await longest_step(store, kill()) for _ in range(5)]
                await store.create("large", 8 << 20, optimizer=AdaGrad(learning_rate=1))
                other = await SparseStore.connect(addresses, TOKEN)
                snapshots = [await longest_step(store, other.snapshot()) for _ in range(3)]
                await other.close()
                await store.flush()
                lost = total * ENTRIES - float((await store.read("w")).sum(dtype=np.float64))
        finally:
            await processes.close()
    return {
        "steps": total,
        "lost_or_repeated_entries": lost,
        "longest_step_undisturbed_s": condensed(quiet),
        "longest_step_while_killed_and_restarted_s": condensed(killed),
        "longest_step_during_a_snapshot_of_72_mb_s": condensed(snapshots),
    }


def show(result: dict[str, Any]) -> None:
    """Tables of a result."""
    for part in ("sides", "shards"):
        for name, row in result.get(part, {}).items():
            if isinstance(row, dict):
                print(f"{name:24}", *(f"{key} {value['median']:>10}" for key, value in row.items()))
    for part in ("bytes", "hand_over"):
        for name, row in result.get(part, {}).items():
            print(f"{name:48}", row)


def _start(stack: ExitStack, *words: str, entries: int = ENTRIES) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sparse_store_sides", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", ENTRIES_VARIABLE: str(entries)},
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    process.terminate()
    for pid in family:
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(_ENDED_S)


async def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    if not line:
        raise ProcessEnded(f"a process has ended: {process.args}")
    return json.loads(line) if line.startswith(("{", "[")) else line


async def _ask(process: subprocess.Popen[str], line: str) -> Any:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return await _line(process)


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
