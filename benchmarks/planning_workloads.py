"""A hundred workloads and platforms drawn at random, and the CPU time of everything that `ephemeron plan` prints for each.

Half of them leave the channel open over the built-in profiles of AWS Lambda; half have transfers whose throughput
saturates (FasDL equations 3-5 and 3-6) at quotas of their own. Models have 0.5 to 500 MB, steps take 0.5 ms to 0.5 s per
sample, data sets have 1,000 to 200,000 samples, and quotas are in steps of 128 MB; a third have a deadline, a sixth a budget.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from ephemeron.errors import PlanInfeasible
from ephemeron.training.planner import PlanLimits, PlanRequest, make_plan
from ephemeron.training.planner.model.builtin import BUILTIN, builtin_platform
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, Workload
from ephemeron.training.planner.model.rates import Saturating, Transfer

COUNT = 100


@dataclasses.dataclass(frozen=True)
class World:
    """Inputs of one plan."""

    profile: Profile
    wish: PlanRequest
    platforms: tuple[PlatformProfile, ...]


def world(seed: int) -> World:
    """Random workload and platform of a seed."""
    rng = np.random.default_rng([20, seed])

    def log(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    m = float(rng.uniform(-110, 1000))
    base = 250 + 3 * (model := log(0.5, 500)) + float(rng.uniform(0, 300))
    what = Workload(
        name=f"random {seed}",
        model_mb=model,
        a=log(5e-4, 0.5) * (1769 + m),
        b=float(rng.uniform(0, 25)),
        m=m,
        memory_slope_mb=log(0.5, 40),
        memory_base_mb=base,
        dataset_mb=log(5, 500),
        samples=int(log(1000, 200_000)),
        vcpus=float(rng.choice([0.0, 1.0, 2.0])),
        fold_s_per_mb=float(rng.choice([0.0, 0.001])),
        test_samples=int(rng.choice([0, 500])),
    )
    objects = builtin_platform("aws-lambda-s3")
    if seed % 2:
        quotas = sorted(rng.choice(np.arange(256, 4096, 128), size=4, replace=False))
        own = tuple(Transfer(memory_mb=float(q), up=_saturating(rng), down=_saturating(rng)) for q in quotas)
        platforms: tuple[PlatformProfile, ...] = (dataclasses.replace(objects, name="saturating", transfer=own),)
    else:
        platforms = tuple(builtin_platform(name) for name in BUILTIN)
    limits = PlanLimits(max_global_batch=int(rng.choice([128, 256, 512, 1024])))
    wish = PlanRequest(epochs=int(rng.integers(1, 20)), limits=limits)
    serial_s = wish.epochs * what.samples * what.a / (1769 + m)
    if seed % 3 == 0:
        wish = dataclasses.replace(wish, limits=dataclasses.replace(limits, deadline_s=60 + serial_s * float(rng.uniform(0.05, 1))))
    elif seed % 6 == 1:
        usd = 0.01 + 3 * serial_s * 1769 / 1024 * objects.price_gb_s
        wish = dataclasses.replace(wish, minimise="time", limits=dataclasses.replace(limits, budget_usd=usd))
    return World(Profile(workload=what, platform=platforms[0]), wish, platforms)


def _saturating(rng: np.random.Generator) -> Saturating:
    return Saturating(p_mb_s=float(rng.uniform(10, 120)), t_per_mb=float(rng.uniform(0.05, 2)))


def cpu_seconds(count: int = COUNT) -> dict[str, Any]:
    """CPU seconds of whole plans: all searches, the front, alternatives, advice and machines."""
    make_plan(world(0).profile, world(0).wish, platforms=world(0).platforms)  # imports and caches
    rows = []
    for seed in range(count):
        w = world(seed)
        began = time.process_time()
        try:
            plan = make_plan(w.profile, w.wish, platforms=w.platforms)
            found: dict[str, Any] = {"reported_s": plan.search.seconds, "optimal": plan.search.optimal}
        except PlanInfeasible as e:
            found = {"infeasible": e.binding}
        rows.append({"seed": seed, "cpu_s": round(time.process_time() - began, 4), **found})
    each = [r["cpu_s"] for r in rows]
    return {
        "workloads": len(rows),
        "cpu_s": {"median": round(statistics.median(each), 4), "worst": max(each)},
        "goal": "worst below 0.3 s, median below 0.05 s",
        "slowest": sorted(rows, key=lambda r: -r["cpu_s"])[:5],
    }
