"""Start times of functions on each platform, on this machine: cold, warm, eight at once, and from function to function.

    python -m benchmarks.platforms [--json] [--rounds 3] [--only aws --only ray]

Functions are empty and import no PyTorch, so the platform's part is measured: from the call in this process, or in a predecessor,
until the function's code runs. Both clocks are this machine's. Rounds alternate between platforms; figures are medians with their
ranges. `relay` is the start time of a successor: from the start of a function that invokes it at once until its own start,
in a chain of four.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.common import condensed, environment, write
from benchmarks.platform_worlds import MEMORY_MB, WORLDS, World
from ephemeron.communication.channels import open_channel
from ephemeron.functions.base import Call, Platform

AT_ONCE = 8
CHAIN = 4
LIMIT_S = 90.0
MEASURES = ("cold_s", "warm_s", f"launch_{AT_ONCE}_s", "relay_s")


class Round:
    """One round on one platform."""

    def __init__(self, platform: Platform, run: str, channel: str) -> None:
        self.platform, self.run, self.channel = platform, run, channel

    async def call(self, rank: int, attempt: int = 0, **request: Any) -> float:
        """Seconds from the call until its code ran."""
        asked = time.time()
        call = Call(
            run=self.run,
            rank=rank,
            attempt=attempt,
            memory_mb=MEMORY_MB,
            lifetime_s=60.0,
            channel=self.channel,
            entry="start",
            request=request,
        )
        outcome = await (await self.platform.invoke(call)).wait()
        if outcome.status != "ok":
            raise RuntimeError(f"{self.platform.name}: {outcome.status}: {outcome.error}")
        return float(outcome.value["began"]) - asked

    async def chain(self) -> list[float]:
        """Seconds from each start in a chain, at which the function asks for a successor, until the successor's start."""
        await self.call(100, attempts=CHAIN)
        async with open_channel(self.channel) as channel:
            end = asyncio.get_running_loop().time() + LIMIT_S
            said = [json.loads(bytes((await channel.get(f"{self.run}/began/100/{n}", deadline=end)).data)) for n in range(CHAIN)]
        return [after["began"] - before["began"] for before, after in itertools.pairwise(said)]


async def measure(world: World, folder: Path) -> dict[str, list[float]]:
    """One round: cold, warm, eight at once, a chain."""
    run = f"bench-{uuid.uuid4().hex[:8]}"
    await world.chill()
    async with asyncio.timeout(LIMIT_S), world.open(folder / run, run) as platform:
        here = Round(platform, run, (folder / run / "objects").as_uri())
        cold = await here.call(0)
        warm = [await here.call(0, attempt) for attempt in (1, 2, 3)]
        launched = await asyncio.gather(*(here.call(rank) for rank in range(10, 10 + AT_ONCE)))
        relays = await here.chain()
    return dict(zip(MEASURES, ([cold], warm, [max(launched)], relays), strict=True))


async def compare(names: tuple[str, ...], rounds: int) -> list[dict[str, Any]]:
    """All platforms, in turn."""
    found: dict[str, dict[str, list[float]]] = {name: {m: [] for m in MEASURES} for name in names}
    notes = {}
    with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
        async with AsyncExitStack() as stack:
            worlds = []
            for name in names:
                where = Path(folder) / name
                where.mkdir()
                worlds.append(await stack.enter_async_context(WORLDS[name](where)))
            for number in range(rounds):
                for world in worlds:
                    click.echo(f"round {number + 1}: {world.name}", err=True)
                    for measured, values in (await measure(world, Path(folder) / world.name)).items():
                        found[world.name][measured] += values
                    notes[world.name] = world.note
    return [{"platform": n, "what": notes[n], **{m: condensed(found[n][m]) for m in MEASURES}} for n in names]


@click.command()
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--only", multiple=True, type=click.Choice(tuple(WORLDS)), help="One platform (repeatable).")
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, only: tuple[str, ...], as_json: bool) -> None:
    """Measures the start times of functions on each platform."""
    began = time.monotonic()
    rows = asyncio.run(compare(only or tuple(WORLDS), rounds))
    out = {
        "environment": environment(),
        "memory_mb": MEMORY_MB,
        "rounds": rounds,
        "platforms": rows,
        "took_s": round(time.monotonic() - began, 1),
        "caution": "services of our own on this machine: no cloud figures",
    }
    if as_json:
        write(out)
        return
    click.echo(f"{'':10} {'cold':>8} {'warm':>8} {'8 at once':>10} {'hand-off':>8}   seconds, medians")
    for row in rows:
        a, b, c, d = (row[m]["median"] for m in MEASURES)
        click.echo(f"{row['platform']:10} {a:8.3f} {b:8.3f} {c:10.3f} {d:8.3f}   {row['what']}")


if __name__ == "__main__":
    main()
