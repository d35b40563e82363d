"""Profile of one job as each platform measures it: this machine, the emulated AWS Lambda, Ray. Run it as a module.

    python -m benchmarks.profile_cloud --json

All functions are processes of this machine, so the steps of a size should take the same time on each platform that limits the
CPU to a function's share. Ray only reserves it: there, sizes below one vCPU are faster. Starts differ, since platforms start functions
in different ways. None of the figures is a cloud's. `largest_difference` compares the predicted step of each size with local's.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.common import ROOT, environment, write
from ephemeron.functions.async_invoke.provider import Settings
from ephemeron.training.job import DataSpec, Job, JobLimits, Target
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.profiling import profile_job
from ephemeron.units import MIB

SIZES = (704, 1024, 1769, 3008)
BATCHES = (16, 64)
OBJECTS_MB = (0.1, 1.0)
BUDGET_USD = 0.5
EVERY_S = 0.1
World = Callable[[], AbstractContextManager[Settings | None]]


def job() -> Job:
    """Handwritten digits, as in the example."""
    return Job(
        name="digits",
        model=Target(target="model:build"),
        data=DataSpec(),
        epochs=1,
        code=(ROOT / "examples" / "digits",),
        limits=JobLimits(max_global_batch=256),
    )


@contextmanager
def local() -> Iterator[None]:
    """Functions of this machine."""
    yield None


@contextmanager
def aws() -> Iterator[Settings]:
    """One function per size on our Lambda service."""
    from ephemeron.functions.aws.deploy.function import LambdaSpec, deploy_sizes
    from ephemeron.functions.aws.deploy.package import build_zip
    from ephemeron.functions.aws.settings import AwsSettings, client
    from ephemeron.functions.source_bundle import digest
    from ephemeron.testing.lambda_service import LambdaService

    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_REGION="us-east-1")
    with LambdaService(concurrency=16) as service:
        settings = AwsSettings(region="us-east-1", endpoint=service.url, every_s=EVERY_S)
        wanted = LambdaSpec(
            role="arn:aws:iam::123456789012:role/none", memory_mb=SIZES[0], timeout_s=300, zipped=build_zip(), digest=digest()
        )
        deploy_sizes(client(settings, "lambda"), settings, wanted, SIZES)
        yield settings


@contextmanager
def ray() -> Iterator[Settings]:
    """A cluster of one node."""
    import ray as library
    from ray.cluster_utils import Cluster

    from ephemeron.functions.ray.settings import RaySettings

    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    node = {"num_cpus": 4, "object_store_memory": 80 * MIB, "memory": 8192 * MIB, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    library.init(address=cluster.address, log_to_driver=False)
    try:
        yield RaySettings(address=cluster.address, every_s=EVERY_S).located()
    finally:
        library.shutdown()
        cluster.shutdown()


WORLDS: dict[str, World] = {"local": local, "aws": aws, "ray": ray}


def measure(name: str, folder: Path) -> Profile:
    """The profile of one platform, over a folder."""
    with WORLDS[name]() as settings:
        click.echo(f"{name}: measuring", err=True)
        return profile_job(
            job(),
            platform=name,
            channel=(folder / name).as_uri(),
            cloud=settings,
            sizes_mb=SIZES if settings else (),
            budget_usd=BUDGET_USD,
            use_cache=False,
            on_budget=lambda text: click.echo(f"{name}: {text}", err=True),
        )


def row(name: str, profile: Profile) -> dict[str, Any]:
    """Figures of one platform."""
    w, p, fit = profile.workload, profile.platform, profile.fit
    return {
        "platform": name,
        "a": round(w.a, 4),
        "b": round(w.b, 3),
        "m": round(w.m, 2),
        "vcpus": round(w.vcpus, 2),
        "memory_slope_mb": round(w.memory_slope_mb, 4),
        "memory_base_mb": round(w.memory_base_mb, 1),
        "cold_start_s": round(p.cold_start_s, 3),
        "warm_start_s": round(p.warm_start_s, 4),
        "step_half_width": fit.steps.half_width,
        "steps": _steps(profile, SIZES),
        "probes": [[c.memory_mb, c.batch, c.seconds, c.predicted_s] for c in fit.steps.probes],
        "transfer_s": [
            {
                "memory_mb": size,
                **{f"{way}_{mb:g}_mb": round(float(p.seconds(way, mb, size)), 5) for way in ("up", "down") for mb in OBJECTS_MB},
            }
            for size in SIZES
        ],
        "calls": fit.platform.calls,
        "billed_usd": fit.platform.billed_usd,
        "took_s": fit.seconds,
    }


def _steps(profile: Profile, sizes: Sequence[int]) -> dict[str, float]:
    """Predicted seconds of a step by size and batch, with the CPU share that it can use."""
    w, most = profile.workload, profile.workload.vcpus * profile.platform.mb_per_vcpu
    return {f"{m}/{b}": round(float(w.compute_s(b, min(m, most))), 6) for m in sizes for b in BATCHES}


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps of each platform divided by those of local."""
    base = next((r for r in rows if r["platform"] == "local"), None)
    if base is None:
        return []
    out = []
    for other in rows:
        if other is not base:
            ratios = {key: round(value / base["steps"][key], 3) for key, value in other["steps"].items()}
            worst = max(abs(ratio - 1) for ratio in ratios.values())
            out.append({"platform": other["platform"], "step_ratio": ratios, "largest_difference": round(worst, 3)})
    return out


@click.command()
@click.option("--only", multiple=True, type=click.Choice(tuple(WORLDS)), help="One platform (repeatable).")
@click.option("--json", "as_json", is_flag=True)
def main(only: tuple[str, ...], as_json: bool) -> None:
    """Measures one job's profile on each platform."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
        os.environ["EPHEMERON_HOME"] = str(Path(folder) / "home")
        rows = [row(name, measure(name, Path(folder))) for name in only or tuple(WORLDS)]
    out = {
        "environment": environment(),
        "sizes_mb": SIZES,
        "batches": BATCHES,
        "budget_usd": BUDGET_USD,
        "platforms": rows,
        "compared": compared(rows),
        "took_s": round(time.monotonic() - began, 1),
        "caution": "services of our own on this machine: no cloud figures",
    }
    if as_json:
        write(out)
        return
    for found in rows:
        click.echo(
            f"{found['platform']:6} cold {found['cold_start_s']:.2f} s, warm {found['warm_start_s']:.3f} s, "
            f"{found['calls']} calls, ${found['billed_usd']:.4f}; steps {found['steps']}"
        )


if __name__ == "__main__":
    main()
