"""FasDL's tables 5.1 to 5.3 as published, and workloads and search spaces made from them.

Assumptions, because the thesis does not state these values: epochs, so that its own optimum costs under its own equations the
costs of table 5.2; memory per sample, so that its own optimum just fits (c: 300 MB and three vectors); CoLA as 8,551 samples of
1 kB, CIFAR-10 as 50,000 of 3 kB.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ephemeron.training.planner.baselines import two_stage
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import Prediction
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, Workload
from ephemeron.training.planner.plan import PlanLimits
from ephemeron.training.planner.search.pareto import Candidate
from ephemeron.training.planner.search.space import Space, make_space

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
    scatter: tuple[int, int, int] | None
    """ScatterReduce's W, M and B; None: no fit. AllReduce's and λDNN's likewise."""
    all_reduce: tuple[int, int, int] | None
    server: tuple[int, int, int] | None
    two_stage_usd: float
    optimum_usd: float
    two_stage_s: float
    optimum_s: float


ROWS = (
    Published(
        "BERT-Base",
        417.17,
        2344.97,
        2.37,
        1145.66,
        8551,
        0.001,
        2500,
        640,
        (10, 10240, 32, 4, 84),
        (15, 10240, 32),
        None,
        (10, 10240, 32),
        3.42,
        3.02,
        32.1,
        155.0,
    ),
    Published(
        "ResNet50",
        97.49,
        37.19,
        12.48,
        -111.46,
        50_000,
        0.003,
        8000,
        1024,
        (7, 1536, 128, 4, 170),
        (8, 1664, 128),
        None,
        (2, 3328, 512),
        1.49,
        1.30,
        290.5,
        2645.6,
    ),
    Published(
        "MobileNet",
        13.37,
        13.50,
        9.57,
        -92.88,
        50_000,
        0.003,
        4000,
        512,
        (3, 1920, 128, 1, 192),
        (4, 2048, 128),
        (4, 1920, 128),
        (2, 2304, 256),
        0.38,
        0.37,
        83.1,
        954.6,
    ),
    Published(
        "SqueezeNet",
        4.71,
        2.16,
        22.60,
        -93.22,
        50_000,
        0.003,
        3000,
        384,
        (2, 768, 128, 1, 201),
        (2, 1792, 128),
        (3, 640, 128),
        (2, 768, 192),
        0.104,
        0.098,
        217.0,
        443.9,
    ),
)


def workload(row: Published) -> Workload:
    """Table 5.1, with a memory line on which the thesis's optimum just fits."""
    _, m, _, _, bn = row.best
    base = RUNTIME_MB + 3 * row.model_mb
    return Workload(
        name=row.name,
        model_mb=row.model_mb,
        a=row.a,
        b=row.b,
        m=row.m,
        memory_base_mb=base,
        memory_slope_mb=(m - base) / bn,
        dataset_mb=row.samples * row.sample_mb,
        samples=row.samples,
    )


def epochs(row: Published, platform: PlatformProfile) -> int:
    """Number of epochs with which the thesis's two-stage result costs as much as in table 5.2."""
    w, m, ba, k, bn = row.best
    one = two_stage(
        workload(row),
        platform,
        ExecutionOptions(pattern="k-reduce", sync="hap"),
        workers=w,
        memory_mb=m,
        aggregators=k,
        batch=ba,
        other_batch=bn,
    )
    return max(1, round(row.two_stage_usd / float(one.cost_usd)))


def space_of(
    row: Published,
    patterns: list[tuple[str, str]],
    platform: PlatformProfile,
    n: int,
    *,
    step: int = 128,
    equations: Callable[..., Prediction] | None = None,
) -> tuple[Space, PlanLimits]:
    limits = PlanLimits(deadline_s=row.deadline_s, max_global_batch=row.max_global_batch)
    terms = [ExecutionOptions(pattern=p, sync=s, epochs=n) for p, s in patterns]
    return make_space(
        Profile(workload=workload(row), platform=platform), terms, limits=limits, memory_step_mb=step, published=equations
    ), limits


def described(c: Candidate | None) -> dict[str, Any] | None:
    if c is None:
        return None
    return {
        "pattern": c.option.terms.pattern,
        "sync": c.option.terms.sync,
        "workers": c.workers,
        "memory_mb": c.memory_mb,
        "aggregators": c.aggregators,
        "batch_size_aggregator": c.batch,
        "batch_size_nonaggregator": c.other_batch,
        "seconds": round(c.seconds, 1),
        "cost_usd": round(c.cost_usd, 5),
    }


KREDUCE = [("k-reduce", "hap"), ("k-reduce", "bsp")]
DISTRIBUTED = [*KREDUCE, ("pipelined", "bsp")]
