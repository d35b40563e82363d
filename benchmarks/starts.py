"""Cost of a cold start on this machine: fresh processes, and processes forked from one that has made their imports.

    python -m benchmarks.starts [--json] [--turns 15] [--together 4]

A start lasts from the request to the function's first message: a process in its control group that has imported everything that a
worker needs (PyTorch, ephemeron). Its CPU seconds are those of the process and, for forks, also those that the server and the
intermediate process have spent on it. Two lower bounds are measured beside it: a fork of a process with the same imports that ends
at once, and `python -c 'import torch'`. All sides alternate. `together`: that many functions started at once without a running
fork server, as at the start of a run; the fork server's own start is part of it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.common import condensed, environment, write
from ephemeron.functions.cgroups import Enforcement, detect
from ephemeron.functions.fork_server import Forks
from ephemeron.functions.function_process import FunctionProcess
from ephemeron.functions.process_messages import Ready
from ephemeron.units import MIB

MEMORY_MB = 704
VCPUS = MEMORY_MB / 1769
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
SIDES = ("fresh", "forked", "bare fork", "import torch")
_BARE = """
import os, sys, time
from ephemeron.functions.entries import preload
preload()
for _ in sys.stdin:
    wall, cpu = time.perf_counter(), time.process_time()
    pid = os.fork()
    if not pid:
        os._exit(0)
    used = os.wait4(pid, 0)[2]
    print(time.perf_counter() - wall, time.process_time() - cpu + used.ru_utime + used.ru_stime, flush=True)
"""


class Starter:
    """Starts functions as the local daemon does.

    Args:
        folder: for their logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._enforcement: Enforcement = detect()
        self._n = 0
        (folder / "logs").mkdir()

    def forks(self) -> Forks:
        forks = Forks.make(self._folder / "logs")
        if forks is None:
            raise click.ClickException("functions cannot be forked on this system")
        return forks

    async def start(self, forks: Forks | None) -> FunctionProcess:
        """Starts a function and waits for its first message."""
        self._n += 1
        function = FunctionProcess(self._enforcement, self._n, memory_mb=MEMORY_MB, vcpus=VCPUS, env=ENV, folder=self._folder, forks=forks)
        first = await function.start()
        if not isinstance(first, Ready):
            raise click.ClickException(f"a function did not start: {function.outcome(first).error}")
        return function

    async def one(self, forks: Forks | None) -> tuple[float, float, float]:
        """Seconds, CPU seconds and private MB of one start."""
        before = _server_cpu_s(forks)
        began = time.perf_counter()
        function = await self.start(forks)
        seconds = time.perf_counter() - began
        cpu = _cpu_s(function.pid) + _server_cpu_s(forks) - before
        private = _private_mb(function.pid)
        await function.dispose()
        return seconds, cpu, private

    async def together(self, workers: int, forks: Forks | None) -> tuple[float, float]:
        """Seconds until the last of so many functions has sent its first message, and CPU seconds of all of them."""
        began = time.perf_counter()
        functions = await asyncio.gather(*(self.start(forks) for _ in range(workers)))
        seconds = time.perf_counter() - began
        cpu = sum(_cpu_s(f.pid) for f in functions) + _server_cpu_s(forks)
        await asyncio.gather(*(f.dispose() for f in functions))
        if forks is not None:
            await forks.close()
        return seconds, cpu


def _cpu_s(pid: int) -> float:
    """CPU seconds of a running process, to the nanosecond."""
    return sum(int(p.read_text().split()[0]) for p in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _server_cpu_s(forks: Forks | None) -> float:
    """CPU seconds of the fork server, and of its children that have ended (to 10 ms)."""
    total = 0.0
    for pid in forks.pids if forks else ():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += _cpu_s(pid) + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return total


def _private_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) * 1024 / MIB


def _import_torch() -> tuple[float, float]:
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], env=ENV, check=True)
    seconds, after = time.perf_counter() - began, os.times()
    return seconds, after.children_user + after.children_system - before.children_user - before.children_system


def _bare_fork(bare: subprocess.Popen[str]) -> tuple[float, ...]:
    assert bare.stdin is not None
    assert bare.stdout is not None
    print(file=bare.stdin, flush=True)
    return tuple(map(float, bare.stdout.readline().split()))


async def measure(turns: int, together: int, bare: subprocess.Popen[str]) -> dict[str, Any]:
    """Measures all sides, in turns; `bare` runs `_BARE`."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    private: dict[str, list[float]] = {"fresh": [], "forked": []}
    launches: dict[str, list[tuple[float, float]]] = {"fresh": [], "forked": []}

    def note(side: str, taken: tuple[float, ...]) -> None:
        seconds[side].append(taken[0])
        cpu[side].append(taken[1])

    with tempfile.TemporaryDirectory() as folder:
        starter = Starter(Path(folder))
        forks = starter.forks()
        await starter.one(forks)  # the fork server runs from now on
        for _ in range(turns):
            for side in ("fresh", "forked"):
                taken = await starter.one(forks if side == "forked" else None)
                note(side, taken)
                private[side].append(taken[2])
            note("bare fork", await asyncio.to_thread(_bare_fork, bare))
            note("import torch", await asyncio.to_thread(_import_torch))
        await forks.close()
        for _ in range(max(3, turns // 3)):
            launches["fresh"].append(await starter.together(together, None))
            launches["forked"].append(await starter.together(together, starter.forks()))
    return {
        "memory_mb": MEMORY_MB,
        "seconds": {side: condensed(values) for side, values in seconds.items()},
        "cpu_s": {side: condensed(values) for side, values in cpu.items()},
        "private_mb": {side: condensed(values) for side, values in private.items()},
        "fresh_over_forked": {
            "seconds": round(median(a / b for a, b in zip(seconds["fresh"], seconds["forked"], strict=True)), 2),
            "cpu_s": round(sum(cpu["fresh"]) / sum(cpu["forked"]), 2),
        },
        "together": {
            "workers": together,
            **{
                side: {"seconds": condensed([s for s, _ in taken]), "cpu_s": condensed([c for _, c in taken])}
                for side, taken in launches.items()
            },
        },
    }


@click.command()
@click.option("--turns", default=15, show_default=True, help="Starts of each kind.")
@click.option("--together", default=4, show_default=True, help="Functions that start at once.")
@click.option("--json", "as_json", is_flag=True)
def main(turns: int, together: int, as_json: bool) -> None:
    """Measures cold starts."""
    where = environment()
    command = [sys.executable, "-c", _BARE]
    with subprocess.Popen(command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bare:
        out = {"environment": where, **asyncio.run(measure(turns, together, bare))}
    out["environment"]["machine"]["load_after"] = [round(load, 2) for load in os.getloadavg()]
    if as_json:
        write(out)
        return
    for side in SIDES:
        click.echo(f"{side:14} {out['seconds'][side]['median']:8.3f} s {out['cpu_s'][side]['median']:8.3f} CPU s")
    click.echo(f"fresh over forked: {out['fresh_over_forked']}")
    for side in ("fresh", "forked"):
        row = out["together"][side]
        click.echo(f"{together} together, {side}: {row['seconds']['median']:.2f} s, {row['cpu_s']['median']:.2f} CPU s")


if __name__ == "__main__":
    main()
