"""Which algorithm for a reduction over direct connections: `python -m benchmarks.direct_algorithms`.

W processes reduce the same vectors in turns: by `DirectReduce` (owners: reduce-scatter and all-gather in two steps, or whole vectors in
one), by `TwoLevelReduce` where machines are several, along a ring, by recursive halving, up a tree (`benchmarks.direct_orders`), and by
gloo's all-reduce. On one machine, over shared memory and TCP; and with processes on several machines, which are network namespaces whose
links have a bandwidth (`benchmarks.machines`; needs root). There is no delay on these links but the kernel's.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import machines
from benchmarks.common import SEED, condensed, environment, write
from benchmarks.direct import real_time
from benchmarks.direct_orders import REDUCTIONS
from benchmarks.direct_rounds import LEAST_ROUNDS, MOST_ROUNDS, CaseFailed
from ephemeron.communication.channels import open_channel
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.transport import SharedTransport, TcpTransport, Transport
from ephemeron.communication.keys import Keys
from ephemeron.testing.direct_world import until
from ephemeron.training.collectives import Group, collective_for
from ephemeron.training.collectives.direct import DirectReduce
from ephemeron.training.collectives.direct_messages import Division
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.units import MB

BURST_S = 0.4
LIMIT_S = 300.0
FEWER, MOST_MB_FEWER = (1, 2), 4.0
"""Numbers of owners with which vectors of at most this size are reduced, too."""
_KINDS = {name: 90 + i for i, name in enumerate(REDUCTIONS)}
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmCase:
    """Case to measure."""

    workers: int
    size_mb: float
    transport: str = "shared"
    """On one machine: `shared` or `tcp`."""
    machines: int = 1
    mbit_s: float = 0.0
    """Of the link of each machine in either direction, if there are several."""

    @property
    def elements(self) -> int:
        return int(self.size_mb * MB) // 4

    @property
    def ranks_per_machine(self) -> int:
        return -(-self.workers // self.machines)

    @property
    def sides(self) -> list[str]:
        halving = [] if self.workers & (self.workers - 1) else ["halving"]
        levels = ["two levels"] if self.machines > 1 else []
        fewer = [f"{n} owners" for n in FEWER if n < self.workers] if self.size_mb <= MOST_MB_FEWER else []
        return ["owners", *fewer, *levels, "ring", *halving, "tree", "gloo"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8], metavar="W")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.004, 0.1, 1.0, 16.0], metavar="MB")
    parser.add_argument("--machines", type=int, default=2, help="number of machines; 1: leave these cases out")
    parser.add_argument("--mbit-s", type=float, default=500.0, help="bandwidth of a machine's link")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    with real_time() as scheduling:
        for case in _cases(arguments):
            if case.machines > 1 and machines.unavailable():
                skipped.append({"case": str(case), "reason": machines.unavailable()})
                continue
            try:
                rows.append(compare(case, turns=arguments.turns))
            except CaseFailed as e:
                skipped.append({"case": str(case), "reason": str(e)})
            else:
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    result = {**environment(), "benchmark": "direct_algorithms", "scheduling": scheduling, "rows": rows, "skipped": skipped}
    if arguments.json:
        write(result)
    else:
        show(rows, Console(width=120))


def _cases(arguments: argparse.Namespace) -> list[AlgorithmCase]:
    found = []
    for workers in arguments.workers:
        for size in arguments.sizes:
            found += [AlgorithmCase(workers=workers, size_mb=size, transport=t) for t in ("shared", "tcp")]
            if arguments.machines > 1 and size > 0.01:
                several = {"machines": arguments.machines, "mbit_s": arguments.mbit_s}
                found.append(AlgorithmCase(workers=workers, size_mb=size, **several))
    return found


def compare(case: AlgorithmCase, *, turns: int) -> dict[str, Any]:
    """Seconds per round of each side, and their ratio to those of `owners` in the same turn.

    Raises:
        CaseFailed: with the first failure.
    """
    if case.machines == 1:
        return _compare(case, turns, [])
    with machines.machines(case.machines, case.mbit_s) as names:
        return _compare(case, turns, names)


def _compare(case: AlgorithmCase, turns: int, names: list[str]) -> dict[str, Any]:
    barrier, rounds = _SPAWN.Barrier(case.workers), _SPAWN.Array("i", len(case.sides))
    answers: Any = _SPAWN.Queue()
    with tempfile.TemporaryDirectory() as folder:
        todo = [
            _SPAWN.Process(target=_work, args=(case, rank, folder, turns, names, barrier, rounds, answers)) for rank in range(case.workers)
        ]
        for process in todo:
            process.start()
        try:
            parts = [answers.get(timeout=LIMIT_S) for _ in todo]
        except queue.Empty:
            raise CaseFailed(f"no answer within {LIMIT_S:.0f} s") from None
        finally:
            for process in todo:
                process.join(2)
                process.kill()
    failures = [part for part in parts if isinstance(part, str)]
    if failures:
        raise CaseFailed(failures[0])
    sides = {
        side: [
            (max(e for _, e, _ in turn) - min(b for b, _, _ in turn)) / turn[0][2]
            for turn in zip(*(part[side] for part in parts), strict=True)
        ]
        for side in case.sides
    }
    ratios = {
        side: condensed([a / b for a, b in zip(seconds, sides["owners"], strict=True)])
        for side, seconds in sides.items()
        if side != "owners"
    }
    return {**asdict(case), "seconds": {s: condensed(found) for s, found in sides.items()}, "ratio_to_owners": ratios}


# -- inside a process -----------------------------------------------------------------------------------------


def _work(case: AlgorithmCase, rank: int, folder: str, turns: int, names: list[str], barrier: Any, rounds: Any, answers: Any) -> None:
    try:
        if names:
            machines.enter(names[rank // case.ranks_per_machine])
        answers.put(asyncio.run(_measure(case, rank, folder, turns, barrier, rounds)))
    except Exception:  # noqa: BLE001 (every failure is reported to the measuring process)
        barrier.abort()
        answers.put(traceback.format_exc(limit=-3))


async def _measure(
    case: AlgorithmCase, rank: int, folder: str, turns: int, barrier: Any, rounds: Any
) -> dict[str, list[tuple[float, float, int]]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if case.machines == 1 else "eth0"
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=case.workers)
    vector = np.random.default_rng(SEED + rank).standard_normal(case.elements, dtype=np.float32)
    tensor = torch.from_numpy(vector.copy())
    meshes: list[Mesh] = []

    async def joined(run: str) -> Mesh:
        mesh = await Mesh.join(
            store=open_channel(f"file://{folder}"),
            rank=rank,
            attempt=0,
            ranks=case.workers,
            keys=Keys(run),
            token="benchmark",
            transports=_transports(case, rank),
        )
        meshes.append(mesh)
        await until(lambda: all(mesh.connected(other) for other in range(case.workers)))
        return mesh

    async def gloo(n: int) -> None:
        for _ in range(n):
            dist.all_reduce(tensor)
        tensor.zero_()

    run: dict[str, Callable[[int], Awaitable[None]]] = {"gloo": gloo}
    run["owners"] = _collective(case, await joined("owners"), vector)
    for n in FEWER:
        if f"{n} owners" in case.sides:
            run[f"{n} owners"] = _collective(case, await joined(f"{n}"), vector, owners=n)
    if "two levels" in case.sides:
        run["two levels"] = _collective(case, await joined("levels"), vector, block=case.ranks_per_machine)
    others = await joined("others")
    for name, kind in _KINDS.items():
        if name in case.sides:
            run[name] = _reduction(REDUCTIONS[name](others, case.workers, case.elements, kind), vector)
    found: dict[str, list[tuple[float, float, int]]] = {side: [] for side in case.sides}
    loop = asyncio.get_running_loop()
    for turn in range(-1, turns):  # the first burst says how many rounds a burst has
        for at, side in enumerate(case.sides):
            await loop.run_in_executor(None, barrier.wait)
            n = rounds[at] if turn >= 0 else LEAST_ROUNDS
            began = time.monotonic()
            await run[side](n)
            ended = time.monotonic()
            if turn >= 0:
                found[side].append((began, ended, n))
            elif rank == 0:
                rounds[at] = max(1, min(MOST_ROUNDS, int(BURST_S * n / (ended - began))))
            await loop.run_in_executor(None, barrier.wait)
    for mesh in meshes:
        await mesh.close()
    dist.destroy_process_group()
    return found


def _transports(case: AlgorithmCase, rank: int) -> Sequence[Transport]:
    if case.machines > 1:
        return [SharedTransport(), TcpTransport(machines.address(rank // case.ranks_per_machine))]
    return [SharedTransport()] if case.transport == "shared" else [TcpTransport()]


def _collective(case: AlgorithmCase, mesh: Mesh, vector: np.ndarray, *, owners: int = 0, block: int = 1) -> Callable[[int], Any]:
    group = Group(
        keys=Keys("benchmark"),
        rank=mesh.rank,
        world=case.workers,
        aggregators=owners or case.workers,
        channel=open_channel("memory"),
        policy=policy_for("bsp"),
        size=case.elements,
        dtype=np.dtype(np.float32),
        mesh=mesh,
        ranks_per_machine=block,
        replays=False,
    )
    collective, number = (DirectReduce(group, mesh, division=Division(whole_bytes=0)) if owners else collective_for("k-reduce", group), 0)

    async def rounds(n: int) -> None:
        nonlocal number
        for _ in range(n):
            t, number = number, number + 1
            collective.submit(t, vector, 1.0)
            tasks = [asyncio.ensure_future(collective.upload(t)), asyncio.ensure_future(collective.reduce(t))]
            await collective.wait(t)
            await tasks[0]
            group.status.applied = group.status.durable = t + 1
            await tasks[1]

    return rounds


def _reduction(reduction: Any, vector: np.ndarray) -> Callable[[int], Any]:
    async def rounds(n: int) -> None:
        for _ in range(n):
            await reduction.round(vector)

    return rounds


# -- pictures -------------------------------------------------------------------------------------------------


def _line(row: dict[str, Any]) -> str:
    where = row["transport"] if row["machines"] == 1 else f"{row['machines']} machines, {row['mbit_s']:g} Mbit/s"
    times = ", ".join(f"{side} {found['median'] * 1e3:.2f}" for side, found in row["seconds"].items())
    return f"W={row['workers']} {row['size_mb']:g} MB, {where}: {times} ms"


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints the table."""
    table = Table(title="Milliseconds per round (median), and × owners")
    for name in ("W", "MB", "connections", "side", "ms", "× owners"):
        table.add_column(name, justify="left" if name in ("side", "connections") else "right")
    for row in rows:
        where = row["transport"] if row["machines"] == 1 else f"{row['machines']} machines, {row['mbit_s']:g} Mbit/s"
        for side, found in row["seconds"].items():
            ratio = row["ratio_to_owners"].get(side)
            table.add_row(
                str(row["workers"]),
                f"{row['size_mb']:g}",
                where,
                side,
                f"{found['median'] * 1e3:.3f}",
                "" if ratio is None else f"{ratio['median']:.2f}",
            )
    console.print(table)


if __name__ == "__main__":
    main()
