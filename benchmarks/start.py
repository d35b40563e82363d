"""Time from a command to the first iteration of four workers, beside DistributedDataParallel, and the start of many local functions.

    python -m benchmarks.start [--json] [--turns 5] [--functions 32]

`first_iteration`: seconds from the command to the end of the first iteration, with the digits and the network of `examples/digits`,
batches of 16 and four workers. Sides, in turns: `ephemeron train`
over a folder; `ddp`: torchrun and gloo, as users start it; `ddp forked`: one process makes the imports of DistributedDataParallel
once and is forked for each worker (`start_peer`), which no tool of PyTorch does.

`functions`: so many local functions of 704 MB on one platform whose fork server runs, from the request to the first line of their
code: all at once (seconds until the last one, and these divided by their number), and one after the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.common import ROOT, condensed, environment, write
from benchmarks.direct_runs import _command, _save_digits
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.local import LocalPlatform

WORKERS = 4
MEMORY_MB = 704
JOB = ROOT / "examples" / "digits" / "job.toml"
SIDES = ("ephemeron", "ddp", "ddp forked")
GOAL = 1.3
"""Ours over `ddp`, within turns."""
EACH_GOAL_S = 0.4


def _ours(folder: Path) -> float:
    home = folder / "home"
    began = time.time()
    said = _command(
        [str(Path(sys.executable).with_name("ephemeron")), "train", str(JOB), "--epochs", "1", "--json"], {"EPHEMERON_HOME": str(home)}
    )
    run_dir = home / "runs" / json.loads(said)["run_id"]
    wall = json.loads((run_dir / "run.json").read_text())["wall_time"]
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return float(wall + next(e["t"] for e in events if e["kind"] == "progress" and e["rank"] == 0) - began)


def _peer(*command: str) -> Callable[[Path], float]:
    def run(folder: Path) -> float:
        out = folder / "peer.json"
        began = time.time()
        _command(
            [sys.executable, "-m", *command, "--data", str(folder / "digits.npz"), "--epochs", "1", "--out", str(out)],
            {"OMP_NUM_THREADS": "1"},
        )
        return float(json.loads(out.read_text())["first_iteration_at"] - began)

    return run


_RUNS: dict[str, Callable[[Path], float]] = {
    "ephemeron": _ours,
    "ddp": _peer("torch.distributed.run", "--nproc-per-node", str(WORKERS), "-m", "benchmarks.direct_peers", "ddp", "--model", "digits"),
    "ddp forked": _peer("benchmarks.start_peer", "--workers", str(WORKERS)),
}


def first_iterations(turns: int, folder: Path, told: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of all sides, in turns, and ratios of ours within turns."""
    _save_digits(folder / "digits.npz")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(turns):
        for i in range(len(SIDES)):
            side = SIDES[(turn + i) % len(SIDES)]
            seconds[side].append(_RUNS[side](folder))
            told(f"{side}: {seconds[side][-1]:.2f} s (load {os.getloadavg()[0]:.1f})")
    return {
        "seconds": {side: condensed(values) for side, values in seconds.items()},
        "ours_over": {
            side: round(median(ours / theirs for ours, theirs in zip(seconds["ephemeron"], seconds[side], strict=True)), 2)
            for side in SIDES[1:]
        },
    }


async def functions(count: int, turns: int, folder: Path) -> dict[str, Any]:
    """Starts of so many functions, each in a process of its own."""
    env = {"EPHEMERON_ENTRIES": "start=benchmarks.platform_functions:run_start", "PYTHONPATH": str(ROOT)}
    together: list[float] = []
    singly: list[float] = []
    for turn in range(turns):
        limits = Limits(memory_max_mb=4 * MEMORY_MB, concurrency=count + 1)
        async with await LocalPlatform.start(folder / f"functions{turn}", env=env, limits=limits) as platform:
            await _began(platform, [0], memory_mb=MEMORY_MB - 64)  # the fork server runs from here on
            asked = time.time()
            together.append(max(await _began(platform, range(1, count + 1))) - asked)
            await platform.shutdown()
        async with await LocalPlatform.start(folder / f"singly{turn}", env=env, limits=limits) as platform:
            await _began(platform, [0], memory_mb=MEMORY_MB - 64)
            for n in range(count):
                asked = time.time()
                singly.append((await _began(platform, [n + 1], memory_mb=MEMORY_MB + n))[0] - asked)
            await platform.shutdown()
    return {
        "count": count,
        "memory_mb": MEMORY_MB,
        "together_s": condensed(together),
        "together_each_s": condensed([s / count for s in together]),
        "one_after_the_other_s": condensed(singly),
    }


async def _began(platform: LocalPlatform, ranks: Sequence[int], *, memory_mb: int = MEMORY_MB) -> list[float]:
    """Unix times at which the code of these functions has begun."""
    calls = [
        Call(run="start", rank=rank, attempt=0, memory_mb=memory_mb, lifetime_s=600.0, channel="folder", entry="start", request={})
        for rank in ranks
    ]
    ended = await asyncio.gather(*[i.wait() for i in [await platform.invoke(call) for call in calls]])
    failed = [e.error for e in ended if e.status != "ok" or not e.value["cold"]]
    if failed:
        raise click.ClickException(f"a function did not start cold: {failed[0]}")
    return [float(str(e.value["began"])) for e in ended]


@click.command(help=__doc__)
@click.option("--turns", default=5, show_default=True)
@click.option("--functions", "count", default=32, show_default=True, help="Local functions to start.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(turns: int, count: int, as_json: bool) -> None:
    """The command."""
    result = environment()
    with tempfile.TemporaryDirectory(prefix="ephemeron-benchmark-") as name:
        folder = Path(name)
        result["first_iteration"] = first_iterations(turns, folder, lambda text: click.echo(text, err=True))
        result["functions"] = asyncio.run(functions(count, max(1, turns // 2), folder))
    result["machine"]["load_after"] = [round(load, 2) for load in os.getloadavg()]
    if as_json:
        write(result)
        return
    found, started = result["first_iteration"], result["functions"]
    for side, seconds in found["seconds"].items():
        click.echo(f"{side:12} {seconds['median']:6.2f} s")
    click.echo(f"ours over ddp: {found['ours_over']} (goal {GOAL})")
    click.echo(f"{count} functions at once: {started['together_s']['median']:.2f} s, {started['together_each_s']['median']:.3f} s each")
    click.echo(f"one after the other: {started['one_after_the_other_s']['median']:.3f} s (goal {EACH_GOAL_S})")


if __name__ == "__main__":
    main()
