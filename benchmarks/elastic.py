"""Cost of a change of functions during a run: iterations that are delayed, and seconds, live and simulated.

    python -m benchmarks.elastic [--json] [--turns 3] [--iterations 200] [--parts live,simulated]

The network of `examples/digits` with global sampling and a global batch of 48, so that an epoch has as many iterations for any number of
functions. A run without a change and runs with one change (more functions, fewer, more memory) alternate. The change is scheduled
after the first half.

Delay: from the end of rank 0's last iteration before the change to the end of the first one after it, less the median of the same time at
later ends of epochs, which have an evaluation, too. So it does not depend on how fast either number of functions is. What functions that start meanwhile take from the others'
CPU, on a machine with few cores, is `slowed_s`: iterations since the first of them was invoked, against the median before. `start_s`:
from the agreement on the change (the first call of a new function) until all new functions wait for its state, as against
the first start of a run without a change (from its first call until its last function has loaded).
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.common import condensed, environment, write
from ephemeron.events import Continued, Event, GenerationStarted, Invoked, Loaded, Progress, Started
from ephemeron.training.driver import configure, train
from ephemeron.training.job import load_job
from ephemeron.training.worker.recovery.fencing import generation_of

JOB = Path(__file__).parents[1] / "examples" / "digits" / "job.toml"
GLOBAL_BATCH = 48
MEMORY_MB = 704
EPOCH = 30
"""Iterations of an epoch: 1,437 samples."""
GOAL_ITERATIONS, GOAL_SHARE = 1.0, 0.02
KINDS: dict[str, tuple[int, dict[str, int]]] = {
    "fixed": (2, {}),
    "grow": (2, {"workers": 3, "batch_size": GLOBAL_BATCH // 3}),
    "shrink": (3, {"workers": 2, "batch_size": GLOBAL_BATCH // 2}),
    "memory": (2, {"memory_mb": 1024}),
}
"""By kind: functions at first, and what changes."""


def once(kind: str, platform: str, iterations: int) -> dict[str, Any]:
    """One run, and what its change has cost."""
    workers, change = KINDS[kind]
    epochs = -(-iterations // EPOCH)
    job = load_job(JOB)
    job = dataclasses.replace(
        job, epochs=epochs, limits=dataclasses.replace(job.limits, budget_usd=None), data=dataclasses.replace(job.data, sampling="global")
    )
    schedule = [{"from_epoch": epochs // 2, **change}] if change else []
    seen: list[Event] = []
    configuration = configure(
        job,
        platform=platform,
        workers=workers,
        aggregators=2,
        batch_size=GLOBAL_BATCH // workers,
        memory_mb=MEMORY_MB,
        resize={"schedule": schedule},
    )
    summary = train(job, configuration, on_event=seen.append).raise_if_failed().summary
    first = [e for e in seen if isinstance(e, (Invoked, Loaded)) and generation_of(e.attempt) == 0]
    began = min(e.t for e in first if isinstance(e, Invoked))
    loaded = max(e.t for e in first if isinstance(e, Loaded))
    out = {"iterations": summary.iterations, "training_s": summary.seconds - loaded, "start_s": loaded - began}
    return out | {"change": cost(seen)} if change else out


def cost(seen: Sequence[Event]) -> dict[str, Any]:
    """What the only change of a run has cost, by the events of the run."""
    change = next(e for e in seen if isinstance(e, GenerationStarted))
    at, done = change.from_iteration, {e.iteration: e.t for e in seen if isinstance(e, Progress) and e.rank == 0}
    taken = {i: done[i] - done[i - 1] for i in sorted(done) if i - 1 in done}
    before, after = [taken[i] for i in taken if 0 < i < at - 20], [taken[i] for i in taken if i > at + 1]
    new = [e for e in seen if isinstance(e, Invoked) and generation_of(e.attempt) == 1]
    started = [e for e in seen if isinstance(e, Started) and generation_of(e.attempt) == 1]
    asked = min((e.t for e in new), default=None)
    ahead = [taken[i] for i in taken if i < at and asked is not None and done[i] > asked]
    delay_s = taken[at] - median(taken[i] for i in taken if i > at and i % EPOCH == 0)
    loads = [e.t - change.t for e in seen if isinstance(e, Loaded) and generation_of(e.attempt) == 1]
    return {
        "from_iteration": at,
        "started": len(new),
        "stayed": sum(isinstance(e, Continued) for e in seen),
        "cold": sum(e.cold for e in started),
        "iteration_before_s": median(before),
        "iteration_after_s": median(after),
        "delay_s": delay_s,
        "delay_iterations": delay_s / median(after),
        "state_stored_s": change.t - done[at - 1],
        "state_loaded_s": max(loads),
        "start_s": None if asked is None else max(e.t for e in started) - asked,
        "late_s": None if asked is None else max(0.0, max(e.t for e in started) - change.t),
        "slowed_s": sum(ahead) - len(ahead) * median(before),
    }


def condensed_costs(costs: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Medians over the runs of one kind, and whether the goals are met.

    Args:
        costs: of the runs.
        seconds: of a run without a change.
    """
    out: dict[str, Any] = {name: costs[0][name] for name in ("from_iteration", "started", "stayed")}
    for name in costs[0]:
        values = [c[name] for c in costs if c[name] is not None]
        if name not in out and values:
            out[name] = condensed(values)
    out["delay_share"] = round(out["delay_s"]["median"] / seconds, 4)
    out["goals_met"] = {"iterations": out["delay_iterations"]["median"] <= GOAL_ITERATIONS, "share": out["delay_share"] <= GOAL_SHARE}
    return out


def measured(platform: str, turns: int, iterations: int) -> dict[str, Any]:
    """All kinds in turns on one platform."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for _ in range(turns):
        for kind, found in runs.items():
            found.append(once(kind, platform, iterations))
            click.echo(f"{platform} {kind}: {found[-1]}", err=True)
    fixed = runs.pop("fixed")
    seconds = median(r["training_s"] for r in fixed)
    return {
        "iterations": fixed[0]["iterations"],
        "fixed": {name: condensed([r[name] for r in fixed]) for name in ("training_s", "start_s")},
        **{
            kind: {"training_s": condensed([r["training_s"] for r in found]), **condensed_costs([r["change"] for r in found], seconds)}
            for kind, found in runs.items()
        },
    }


@click.command()
@click.option("--turns", default=3, show_default=True, help="Live runs of each kind; one of each is simulated.")
@click.option("--iterations", default=200, show_default=True, help="Length of a run, rounded up to whole epochs.")
@click.option("--parts", default="live,simulated", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(turns: int, iterations: int, parts: str, as_json: bool) -> None:
    """Measures the cost of a change of functions."""
    out: dict[str, Any] = {
        "environment": environment(),
        "global_batch": GLOBAL_BATCH,
        "goals": {"delay_iterations": GOAL_ITERATIONS, "delay_share": GOAL_SHARE},
    }
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        if "live" in parts.split(","):
            out["live"] = measured("local", turns, iterations)
        if "simulated" in parts.split(","):
            out["simulated"] = measured("simulated", 1, iterations)
    out["environment"]["machine"]["load_after"] = [round(load, 2) for load in os.getloadavg()]
    if as_json:
        write(out)
        return
    for part in ("live", "simulated"):
        for kind in [k for k in KINDS if k != "fixed" and part in out]:
            row = out[part][kind]
            iterations_, seconds = row["delay_iterations"]["median"], row["delay_s"]["median"]
            click.echo(f"{part:9} {kind:7} {iterations_:6.2f} iterations {seconds:7.3f} s {row['delay_share']:8.2%}")


if __name__ == "__main__":
    main()
