"""Configuration search on FasDL's four workloads (table 5.1) under its constraints (table 5.3), and its figures again.

    python -m benchmarks.planning [--json] [--out FOLDER] [--workloads N]

`whole_plans` is the CPU time of everything that `ephemeron plan` says of a hundred random workloads
(`benchmarks/planning_workloads.py`): worst and median.

Search: seconds, candidates and cost of `exact` at 128 MB and at 1 MB steps and of `two-stage` (algorithms 3.1 and 3.2),
under the honest model and under the published equations; decay is equation 5-1. The thesis needs 32 to 290 s for two
stages and 155 to 2,646 s for the optimum, and loses 2.7 to 14.6 %.

Figures 5.4 to 5.7: the optimum per pattern (K-REDUCE with HAP, ScatterReduce, AllReduce, λDNN), and K-REDUCE's W, M and
B^a under the other patterns. Figure 5.12: object store, cache, server. Figure 5.13: standalone against the fastest.
All of it is **predicted**: nothing runs on AWS here.

Assumed, since the thesis does not say: epochs, so that its own optimum costs under its own equations what table 5.2
says; memory per sample, so that its own optimum just fits (c: 300 MB and three vectors); CoLA as 8,551 samples of 1 kB,
CIFAR-10 as 50,000 of 3 kB; prices and transfers of the built-in profiles.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common import environment, write
from benchmarks.planning_thesis import thesis_rows
from benchmarks.planning_workloads import COUNT, cpu_seconds
from ephemeron.performance.builtin import builtin_platform
from ephemeron.performance.model import Terms, published
from ephemeron.performance.profile import PlatformProfile, Profile, Workload
from ephemeron.planning.heuristics import evaluate, two_stage
from ephemeron.planning.pareto import Candidate, Found
from ephemeron.planning.search import exact
from ephemeron.planning.space import Limits, Space, make_space

RUNTIME_MB = 300.0


@dataclasses.dataclass(frozen=True)
class Published:
    """One row of tables 5.1 to 5.3."""

    name: str
    model_mb: float
    a: float
    b: float
    m: float
    samples: int
    sample_mb: float
    deadline_s: float
    max_global_batch: int
    best: tuple[int, int, int, int, int]
    """K-REDUCE's W, M, B^a, K and B^n."""
    two_stage_usd: float
    optimum_usd: float
    two_stage_s: float
    optimum_s: float


ROWS = (
    Published("BERT-Base", 417.17, 2344.97, 2.37, 1145.66, 8551, 0.001, 2500, 640, (10, 10240, 32, 4, 84), 3.42, 3.02, 32.1, 155.0),
    Published("ResNet50", 97.49, 37.19, 12.48, -111.46, 50_000, 0.003, 8000, 1024, (7, 1536, 128, 4, 170), 1.49, 1.30, 290.5, 2645.6),
    Published("MobileNet", 13.37, 13.50, 9.57, -92.88, 50_000, 0.003, 4000, 512, (3, 1920, 128, 1, 192), 0.38, 0.37, 83.1, 954.6),
    Published("SqueezeNet", 4.71, 2.16, 22.60, -93.22, 50_000, 0.003, 3000, 384, (2, 768, 128, 1, 201), 0.104, 0.098, 217.0, 443.9),
)  # fmt: skip


def workload(row: Published) -> Workload:
    """Table 5.1, with a memory line on which the thesis's optimum just fits."""
    _, m, _, _, bn = row.best
    base = RUNTIME_MB + 3 * row.model_mb
    return Workload(
        name=row.name, model_mb=row.model_mb, a=row.a, b=row.b, m=row.m, memory_base_mb=base,
        memory_slope_mb=(m - base) / bn, dataset_mb=row.samples * row.sample_mb, samples=row.samples,
    )  # fmt: skip


def epochs(row: Published, platform: PlatformProfile) -> int:
    """So many that the thesis's two-stage result costs what table 5.2 says."""
    w, m, ba, k, bn = row.best
    one = published(
        workload(row), platform, Terms(pattern="k-reduce", sync="hap"), workers=w, memory_mb=m, aggregators=k, batch=ba, other_batch=bn
    )  # fmt: skip
    return max(1, round(row.two_stage_usd / float(one.cost_usd)))


def space_of(
    row: Published,
    patterns: list[tuple[str, str]],
    platform: PlatformProfile,
    n: int,
    *,
    step: int = 128,
    model: str = "honest",
) -> tuple[Space, Limits]:
    limits = Limits(deadline_s=row.deadline_s, max_global_batch=row.max_global_batch)
    terms = [Terms(pattern=p, sync=s, epochs=n) for p, s in patterns]
    return make_space(
        Profile(workload=workload(row), platform=platform), terms, limits=limits, memory_step_mb=step, model=model
    ), limits


def described(c: Candidate | None) -> dict[str, Any] | None:
    if c is None:
        return None
    return {
        "pattern": c.option.terms.pattern, "sync": c.option.terms.sync, "workers": c.workers, "memory_mb": c.memory_mb,
        "aggregators": c.aggregators, "batch_size_aggregator": c.batch, "batch_size_nonaggregator": c.other_batch,
        "seconds": round(c.seconds, 1), "cost_usd": round(c.cost_usd, 5),
    }  # fmt: skip


KREDUCE = [("k-reduce", "hap"), ("k-reduce", "bsp")]
DISTRIBUTED = [*KREDUCE, ("pipelined", "bsp")]


def search_rows(row: Published, platform: PlatformProfile, repeats: int) -> list[dict[str, Any]]:
    """Exact at both steps and two-stage, under both models."""
    out = []
    n = epochs(row, platform)
    for model, patterns in (("honest", KREDUCE), ("published", [("k-reduce", "hap")])):
        found: dict[str, Found] = {}
        seconds: dict[str, list[float]] = {}
        for _ in range(repeats):
            for name, step, search in (
                ("exact, 128 MB", 128, exact),
                ("exact, 1 MB", 1, exact),
                ("two-stage, 128 MB", 128, two_stage),
            ):
                space, limits = space_of(row, patterns, platform, n, step=step, model=model)
                found[name] = search(space, limits)
                seconds.setdefault(name, []).append(found[name].seconds)
        optimum = found["exact, 128 MB"].best
        for name, f in found.items():
            decay = None if f.best is None or optimum is None else round(f.best.cost_usd / optimum.cost_usd - 1, 5)
            out.append({
                "workload": row.name, "model": model, "epochs": n, "search": name, "seconds": round(statistics.median(seconds[name]), 4),
                "evaluated": f.evaluated, "pruned": f.pruned, "decay_against_128_mb": decay, "best": described(f.best),
                "thesis": {"two_stage_s": row.two_stage_s, "optimum_s": row.optimum_s, "decay": round(row.two_stage_usd / row.optimum_usd - 1, 3)},
            })  # fmt: skip
    return out


def pattern_rows(row: Published, objects: PlatformProfile, server: PlatformProfile) -> list[dict[str, Any]]:
    """Figures 5.4 to 5.7: optimum per pattern, and K-REDUCE's resources under the others."""
    n = epochs(row, objects)
    out = []
    chosen = None
    for label, patterns, platform in (
        ("K-Opt", KREDUCE, objects), ("Scatter-Opt", [("scatter-reduce", "bsp")], objects),
        ("All-Opt", [("all-reduce", "bsp")], objects), ("pipelined-Opt", [("pipelined", "bsp")], objects),
        ("λDNN-Opt", [("parameter-server", "bsp")], server),
    ):  # fmt: skip
        space, limits = space_of(row, patterns, platform, n)
        best = exact(space, limits).best
        chosen = best if label == "K-Opt" else chosen
        out.append({"workload": row.name, "which": label, "best": described(best)})
    if chosen is not None:
        for label, pattern, k in (("Scatter-CP", "scatter-reduce", chosen.workers), ("All-CP", "all-reduce", 1)):
            space, _ = space_of(row, [(pattern, "bsp")], objects, n)
            space = dataclasses.replace(space, largest_global_batch=1 << 30)
            one = evaluate(space, space.options[0], chosen.workers, chosen.memory_mb, k, chosen.batch)
            out.append({"workload": row.name, "which": label, "best": described(one)})
    return out


def channel_rows(row: Published, platforms: dict[str, PlatformProfile]) -> list[dict[str, Any]]:
    """Figure 5.12: the cheapest within the deadline over each kind of channel."""
    n = epochs(row, platforms["aws-lambda-s3"])
    out = []
    for name, platform in platforms.items():
        patterns = [("parameter-server", "bsp")] if platform.channel == "server" else DISTRIBUTED
        space, limits = space_of(row, patterns, platform, n)
        out.append({"workload": row.name, "channel": name, "best": described(exact(space, limits).best)})
    return out


def standalone_rows(row: Published, platforms: dict[str, PlatformProfile]) -> list[dict[str, Any]]:
    """Figure 5.13: least time, distributed over either channel and on one function."""
    n = epochs(row, platforms["aws-lambda-s3"])
    out = []
    for label, patterns, name in (
        ("standalone", [("standalone", "bsp")], "aws-lambda-s3"), ("distributed, S3", DISTRIBUTED, "aws-lambda-s3"),
        ("distributed, cache", DISTRIBUTED, "aws-lambda-cache"),
    ):  # fmt: skip
        space, limits = space_of(row, patterns, platforms[name], n)
        free = dataclasses.replace(limits, deadline_s=None)
        out.append({"workload": row.name, "which": label, "best": described(exact(space, free, minimise="time").best)})
    return out


def draw(result: dict[str, Any], out: Path) -> list[Path]:
    """Bars of cost and time per figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    written = []
    for table, label in (("patterns", "which"), ("channels", "channel"), ("standalone", "which")):
        names = [r.name for r in ROWS]
        kinds = list(dict.fromkeys(r[label] for r in result[table]))
        figure, axes = plt.subplots(2, len(names), figsize=(3.4 * len(names), 6.4), constrained_layout=True)
        for column, name in enumerate(names):
            for line, (value, unit) in enumerate(
                (("seconds", "seconds (predicted)"), ("cost_usd", "US dollars (predicted)"))
            ):
                ax = axes[line][column]
                rows = {r[label]: r["best"] for r in result[table] if r["workload"] == name}
                heights = [rows[k][value] if rows.get(k) else np.nan for k in kinds]
                ax.bar(range(len(kinds)), heights, color=[f"C{i}" for i in range(len(kinds))])
                for i, h in enumerate(heights):
                    ax.text(
                        i,
                        0 if np.isnan(h) else h,
                        "no fit" if np.isnan(h) else f"{h:.3g}",
                        ha="center",
                        va="bottom",
                        fontsize=7,
                    )
                ax.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right", fontsize=7)
                ax.set_title(name if line == 0 else "")
                if column == 0:
                    ax.set_ylabel(unit)
        path = out / f"planning-{table}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(path)
    return written


@click.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for pictures.")
@click.option(
    "--thesis", is_flag=True, help="Only the thesis's own configurations, at equal B^a and at equal global batch."
)
@click.option("--workloads", default=COUNT, show_default=True, help="Random workloads of which whole plans are timed.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each search; medians are reported.")
def main(as_json: bool, out: Path | None, thesis: bool, workloads: int, repeats: int) -> None:
    """Measures the searches, and draws what they find."""
    platforms = {name: builtin_platform(name) for name in ("aws-lambda-s3", "aws-lambda-cache", "aws-lambda-server")}
    objects, server = platforms["aws-lambda-s3"], platforms["aws-lambda-server"]
    result: dict[str, Any] = {
        "environment": environment(),
        "goal": "exact under 1 s at 128 MB, under 5 s at 1 MB, decay 0",
    }
    if thesis:
        result["thesis"] = thesis_rows(ROWS, workload, epochs, objects)
        if as_json:
            write(result)
            return
        for r in [*result["thesis"]["rows"], *result["thesis"]["means"]]:
            click.echo(
                f"{r.get('workload', 'mean'):10} {r['model']:9} equal {r['equal']:12} against {r['against']:14} "
                f"saves {r['saves_time']:+7.1%} time {r['saves_cost']:+7.1%} cost"
            )
        return
    if workloads:
        result["whole_plans"] = cpu_seconds(workloads)
    result["search"] = [r for row in ROWS for r in search_rows(row, objects, repeats)]
    result["patterns"] = [r for row in ROWS for r in pattern_rows(row, objects, server)]
    result["channels"] = [r for row in ROWS for r in channel_rows(row, platforms)]
    result["standalone"] = [r for row in ROWS for r in standalone_rows(row, platforms)]
    if out is not None:
        result["pictures"] = [p.name for p in draw(result, out)]
    if as_json:
        write(result)
        return
    if workloads:
        cpu = result["whole_plans"]["cpu_s"]
        click.echo(
            f"whole plans of {workloads} random workloads: median {cpu['median']} s, worst {cpu['worst']} s of CPU"
        )
    for r in result["search"]:
        b = r["best"]
        found = (
            "nothing"
            if b is None
            else f"{b['workers']:3d} × {b['memory_mb']:5d} MB, K {b['aggregators']}, {b['batch_size_aggregator']}/{b['batch_size_nonaggregator']}, {b['seconds']:8.0f} s, ${b['cost_usd']:.4f}"
        )
        click.echo(
            f"{r['workload']:10} {r['model']:9} {r['search']:18} {r['seconds']:8.3f} s  {r['evaluated']:8d} computed  {found}  decay {r['decay_against_128_mb']}"
        )
    for table, label in (("patterns", "which"), ("channels", "channel"), ("standalone", "which")):
        click.echo(f"\n{table}")
        for r in result[table]:
            b = r["best"]
            click.echo(
                f"{r['workload']:10} {r[label]:20} "
                + (
                    "no fit"
                    if b is None
                    else f"{b['pattern']:16} {b['sync']} {b['workers']:3d} × {b['memory_mb']:5d} MB, K {b['aggregators']:2d}, {b['batch_size_aggregator']}/{b['batch_size_nonaggregator']}, {b['seconds']:8.0f} s, ${b['cost_usd']:.4f}"
                )
            )


if __name__ == "__main__":
    main()
