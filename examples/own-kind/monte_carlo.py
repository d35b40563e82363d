"""A kind of runs of your own: pi from random points, which functions draw in batches.

    python monte_carlo.py 4 400        # functions, batches

The run is in `ephemeron runs`; `ephemeron stop`, `resume`, `attach`, `logs` and `report` work on it. A batch is an object of its channel that is
created once, so whatever dies or is stopped, nothing is drawn twice, and the result is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ephemeron import blocking
from ephemeron.communication.channels import open_channel
from ephemeron.errors import KeyExists
from ephemeron.functions.context import Context
from ephemeron.prices import load_prices
from ephemeron.runs import folders
from ephemeron.runs.header import RunHeader, open_header, write_header
from ephemeron.runs.keep_running import keep_running
from ephemeron.runs.kinds import Following, RunKind
from ephemeron.runs.lock import driving
from ephemeron.runs.stop_requests import request_stop
from ephemeron.runs.summary import RunResult, read_summary

POINTS = 200_000
ENV = {"EPHEMERON_ENTRIES": "monte-carlo=monte_carlo:draw", "PYTHONPATH": str(Path(__file__).parent)}


@dataclass(frozen=True)
class Share:
    """Batches of one function: every `of`-th of `batches`, from `first` on."""

    first: int
    of: int
    batches: int


async def draw(ctx: Context, share: Share) -> dict[str, str]:
    """The entry: draws what is not there yet, until nothing is left, or its time is nearly up."""
    prefix, loop = f"{ctx.call.run}/batch/", asyncio.get_running_loop()
    there = set(await ctx.channel.list(prefix))
    for batch in range(share.first, share.batches, share.of):
        if loop.time() > ctx.deadline - 2:
            return {"outcome": "unfinished"}
        if (key := f"{prefix}{batch:06d}") not in there:
            x, y = np.random.default_rng(batch).random((2, POINTS))
            with contextlib.suppress(KeyExists):  # by the function before this one, which was not dead yet
                await ctx.channel.put(key, [b"%d" % np.count_nonzero(x * x + y * y < 1)], create=True)
    return {"outcome": "done"}


class MonteCarloRuns(RunKind):
    """What verbs do with these runs."""

    def resume(self, folder: folders.RunFolder, header: RunHeader, following: Following) -> RunResult:
        shares = [Share(first, header.functions, header.payload["batches"]) for first in range(header.functions)]
        how = {"entry": "monte-carlo", "requests": shares, "env": ENV, "on_event": following.on_event}
        return blocking.run(lambda interrupts: keep_running(folder, header, interrupts=interrupts, **how))

    def attach(self, folder: folders.RunFolder, header: RunHeader, following: Following) -> RunResult:
        return self.result(folder) or self.resume(folder, header, following)

    def stop(self, folder: folders.RunFolder, header: RunHeader, *, now: bool) -> None:
        request_stop(folder, now=now)

    def result(self, folder: folders.RunFolder) -> RunResult | None:
        summary = read_summary(folder)
        return None if summary is None else RunResult(summary, folder, summary.causes)


async def pi(header: RunHeader) -> float:
    """The estimate from all batches that are there."""
    async with open_channel(header.channel) as channel:
        counts = [int(bytes(await channel.fetch(key) or b"0")) for key in await channel.list(f"{header.run_id}/batch/")]
    return 4 * sum(counts) / (POINTS * max(len(counts), 1))


def launch(functions: int, batches: int) -> tuple[RunResult, float]:
    """Starts a run and waits for its end."""
    folder = folders.create(folders.new_run_id("pi"))
    folder.create_key()
    channel, prices = folder.objects.resolve().as_uri(), load_prices("objects")
    details = {"functions": functions, "memory_mb": 512, "lifetime_s": 60.0, "payload": {"batches": batches}}
    write_header(folder, RunHeader(run_id=folder.run_id, kind="monte-carlo", platform="local", channel=channel, prices=prices, **details))
    with driving(folder):
        result = MonteCarloRuns().resume(folder, open_header(folder), Following(on_event=print))
    return result, asyncio.run(pi(open_header(folder)))


if __name__ == "__main__":
    result, estimate = launch(*map(int, sys.argv[1:] or ("2", "100")))
    print(f"{result.summary.status}: {estimate:.6f}, ${result.summary.cost_usd:.6f} for {result.summary.invocations} invocations")
