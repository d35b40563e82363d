"""The environment of `benchmarks.siren` beside the simulator: epochs with fixed functions, and a run whose functions change."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from ephemeron.functions.base import Limits
from ephemeron.training.driver import configure, train
from ephemeron.training.job import ComputeModel, Job
from ephemeron.training.planner.model.profile import Profile, Workload
from ephemeron.training.profiling.simulated import world_profile
from ephemeron.training.task.learned_schedule import ActionBounds
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, Noise
from ephemeron.tuning.siren.epoch_model import EpochModel
from ephemeron.tuning.siren.fitting import MeasuredRun
from ephemeron.tuning.siren.loss_curve import LossCurve

QUIET = Noise(spread=0.0, straggler_share=0.0, loss_spread=0.0)
CHANGES = (2, 6, 3, 8)
"""Functions of a run by two epochs each."""
MEMORY_MB = 1792
DIGITS, TEST = 1437, 360


def against_simulator(
    job: Job, curve: LossCurve, runs: Mapping[int, MeasuredRun], *, model_mb: float, batch: int, aggregators: int
) -> dict[str, Any]:
    """Relative errors of the environment.

    Args:
        job: whose simulation has a compute model.
        curve: of its loss.
        runs: simulated ones with fixed functions, by their number.
        model_mb: of its parameters.
        batch, aggregators: of the runs.
    """
    compute = job.simulation.compute
    assert isinstance(compute, ComputeModel)
    workload = Workload(
        name=job.name, model_mb=model_mb, a=compute.a, b=compute.b, m=compute.m, memory_slope_mb=0.0, memory_base_mb=300.0,
        dataset_mb=0.4, samples=DIGITS, test_samples=TEST,
    )  # fmt: skip
    profile = Profile(workload=workload, platform=world_profile(job.simulation, Limits()))
    bounds = ActionBounds(most_workers=max(CHANGES), quotas_mb=(MEMORY_MB,))
    plain = EpochModel(profile, bounds, batch_size=batch, aggregators=aggregators)
    inside, outside = ([runs[w].epochs for w in names] for names in (curve.runs, curve.held_out))
    model = plain.corrected(inside, outside)
    seconds, cost = model.corrections
    bare = [plain.epochs([e.workers], [e.memory_mb])[0].seconds / e.seconds - 1 for e in (*inside, *outside)]
    spec = EnvironmentSpec(
        job=job.name, profile=profile, curve=curve, target_loss=1e-6, budget_usd=1e6, epochs=100, batch_size=batch,
        aggregators=aggregators, bounds=bounds, seconds=seconds, cost=cost, noise=QUIET, reference_s=1.0,
    )  # fmt: skip
    env = Environment(spec, noisy=False)
    chosen = [w for w in CHANGES for _ in range(2)]
    for w in (chosen[0], *chosen[2:], chosen[-1]):  # an action takes effect an epoch later
        env.advance(env.table[w, MEMORY_MB])
    real = _elastic(job, batch, aggregators)
    return {
        "epoch_s_error_without_correction": [round(x, 3) for x in bare], "epoch_s_error": round(seconds.error, 4),
        "epoch_usd_error": round(cost.error, 4), "held_out_functions": list(curve.held_out),
        "run_with_changes": {
            "functions": list(CHANGES), "simulated_s": round(real[0], 2), "environment_s": round(env.seconds, 2),
            "simulated_usd": round(real[1], 6), "environment_usd": round(env.spent_usd, 6),
            "error_s": round(env.seconds / real[0] - 1, 4), "error_usd": round(env.spent_usd / real[1] - 1, 4),
        },
    }  # fmt: skip


def _elastic(job: Job, batch: int, aggregators: int) -> tuple[float, float]:
    """Seconds and cost of a simulated run whose functions change every two epochs."""
    entries = [
        {"from_epoch": 2 * i, "workers": w, "aggregators": min(aggregators, w)} for i, w in enumerate(CHANGES) if i
    ]
    fixed = dataclasses.replace(job, epochs=2 * len(CHANGES), early_stopping=None)
    before = os.environ.get("EPHEMERON_HOME")
    with tempfile.TemporaryDirectory() as home:
        os.environ["EPHEMERON_HOME"] = home
        try:
            configuration = configure(
                fixed, platform="simulated", workers=CHANGES[0], memory_mb=MEMORY_MB, sync="hsp", batch_size=batch,
                aggregators=aggregators, schedule=entries,
            )  # fmt: skip
            summary = train(fixed, configuration, on_event=lambda event: None).raise_if_failed().summary
        finally:
            del os.environ["EPHEMERON_HOME"]
            if before is not None:
                os.environ["EPHEMERON_HOME"] = before
    return summary.seconds, summary.cost_usd
