"""A small job whose loss and epochs are known, as an environment of a learned schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ephemeron.training.planner.model.builtin import builtin_platform
from ephemeron.training.planner.model.profile import Profile, Workload
from ephemeron.training.task.learned_schedule import ActionBounds
from ephemeron.tuning.siren.environment import EnvironmentSpec, Noise
from ephemeron.tuning.siren.loss_curve import LossCurve

QUIET = Noise(spread=0.0, straggler_share=0.0, loss_spread=0.0)
CURVE = LossCurve(
    start=2.3,
    samples=20_000,
    batch_size=32,
    knots=tuple(np.geomspace(0.05, 2.5, 6).tolist()),
    rates=(0.002, 0.003, 0.004, 0.005, 0.006, 0.006),
    noise=0.008,
)
WORKLOAD = Workload(
    name="net",
    model_mb=0.5,
    a=1.77,
    b=2.0,
    m=0.0,
    memory_slope_mb=0.5,
    memory_base_mb=300.0,
    dataset_mb=10.0,
    samples=20_000,
    test_samples=2_000,
    vcpus=1.0,
)


def spec(**changes: Any) -> EnvironmentSpec:
    """The environment's description with other values."""
    found = EnvironmentSpec(
        job="net",
        profile=Profile(workload=WORKLOAD, platform=builtin_platform("aws-lambda-s3")),
        curve=CURVE,
        target_loss=0.3,
        budget_usd=0.05,
        epochs=60,
        batch_size=32,
        bounds=ActionBounds(most_workers=16, quotas_mb=(512, 1024, 1792)),
        reference_s=100.0,
        noise=QUIET,
    )
    return dataclasses.replace(found, **changes)
