"""Cost of hand-offs on this machine: the same run with a function timeout of a tenth of its duration, and without a limit.

    python -m benchmarks.handoffs [--json] [--epochs 200] [--pairs 2]

Functions are real processes with quotas. At the first hand-off of a run successors start cold. Later ones reuse the warm
environments of their predecessors' predecessors. Both sides alternate; seconds are from launch to end, less
the first start, which both sides have alike. `warm` counts from the first iteration after the first hand-off to the end, on both
sides: the cost of hand-offs with warm starts.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.common import environment, write
from ephemeron.events import Event, Loaded, Progress
from ephemeron.training.driver import configure, train
from ephemeron.training.job import load_job

JOB = Path(__file__).parents[1] / "examples" / "digits" / "job.toml"


def once(epochs: int, lifetime_s: float | None) -> dict[str, Any]:
    """One run; its seconds after all functions have loaded for the first time."""
    job = dataclasses.replace(load_job(JOB), epochs=epochs)
    job = dataclasses.replace(job, limits=dataclasses.replace(job.limits, budget_usd=None))
    loaded: dict[int, float] = {}
    done: dict[int, float] = {}
    relayed_at: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, Loaded):
            loaded.setdefault(event.rank, event.t)
            if event.rank == 0 and event.attempt == 1:
                relayed_at.append(event.iteration)
        if isinstance(event, Progress) and event.rank == 0:
            done[event.iteration] = event.t

    result = train(job, configure(job, platform="local", function_timeout_s=lifetime_s), on_event=note).raise_if_failed()
    s = result.summary
    return {
        "lifetime_s": lifetime_s,
        "seconds": s.seconds - max(loaded.values()),
        "invocations": s.invocations,
        "cost_usd": s.cost_usd,
        "weights_sha256": s.weights_sha256,
        "first_relay_at": relayed_at[0] if relayed_at else None,
        "done": done,
    }


@click.command()
@click.option("--epochs", default=200, show_default=True, help="Length of the run.")
@click.option("--pairs", default=2, show_default=True, help="Runs of each kind.")
@click.option("--json", "as_json", is_flag=True)
def main(epochs: int, pairs: int, as_json: bool) -> None:
    """Measures the cost of hand-offs."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        whole, relayed = [], []
        for _ in range(pairs):
            whole.append(once(epochs, None))
            relayed.append(once(epochs, round(whole[0]["seconds"] / 10, 2)))
    ratio = median(r["seconds"] for r in relayed) / median(w["seconds"] for w in whole)
    same = len({r["weights_sha256"] for r in whole + relayed}) == 1
    first = max(r["first_relay_at"] or 0 for r in relayed)
    warm = [median(r["done"][max(r["done"])] - r["done"][first] for r in runs) for runs in (relayed, whole)]
    for r in whole + relayed:
        del r["done"]
    rows = [{"kind": k, **r} for k, rs in (("no limit", whole), ("a tenth", relayed)) for r in rs]
    out = {
        "environment": environment(),
        "runs": rows,
        "ratio_of_medians": round(ratio, 4),
        "ratio_warm": round(warm[0] / warm[1], 4),
        "goal": 1.05,
        "same_weights": same,
    }
    if as_json:
        write(out)
        return
    for row in rows:
        click.echo(f"{row['kind']:>8}  {row['seconds']:7.2f} s  {row['invocations']:3d} invocations  ${row['cost_usd']:.5f}")
    click.echo(f"ratio {out['ratio_of_medians']}, warm {out['ratio_warm']} (goal {out['goal']}), same weights: {same}")


if __name__ == "__main__":
    main()
