"""The environment beside simulated runs with real gradients whose functions change."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("gymnasium", reason="the extra siren is not installed")

from benchmarks.siren_oracle import replayed, schedule_errors
from siren_worlds import CURVE, QUIET, WORKLOAD, spec
from tests.tiny_job import CODE

from ephemeron.functions.base import Limits
from ephemeron.training.job import ComputeModel, DataSpec, EarlyStopping, Job, Simulation, Target
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.profiling.simulated import world_profile
from ephemeron.training.task.learned_schedule import ActionBounds
from ephemeron.tuning.siren.epoch_model import EpochModel
from ephemeron.tuning.siren.fitting import measured_run

JOB = Job(
    name="tiny",
    model=Target(target="tiny:mlp"),
    data=DataSpec(sampling="global"),
    epochs=3,
    code=(CODE,),
    optimizer=Target(target="SGD", options={"lr": 0.05}),
    early_stopping=EarlyStopping(threshold=0.01),
    simulation=Simulation(compute=ComputeModel(a=100.0, b=2.0, m=0.0)),
)
MEMORY_MB = 1792


def test_a_replay_adds_epochs_and_changes() -> None:
    wanted = spec(noise=QUIET)
    seconds, usd, losses = replayed(wanted, [(4, 1792)] * 2 + [(8, 1792)])
    table = EpochModel(wanted.profile, wanted.bounds, batch_size=32, aggregators=2).table
    few, many = table[4, 1792], table[8, 1792]
    assert seconds == pytest.approx(few.cold_s + few.begin_s + 2 * few.seconds + many.begin_s + many.seconds)
    assert usd > 2 * few.cost_usd + many.cost_usd
    assert losses == pytest.approx(CURVE.losses([4, 4, 8]), rel=1e-3)


@pytest.mark.slow
def test_a_run_with_changes_takes_what_the_environment_says() -> None:
    """Epochs of 2 and 4 functions correct the environment; a run that changes from one to 2 to 4 is not fitted."""
    compute = JOB.simulation.compute
    assert isinstance(compute, ComputeModel)
    workload = dataclasses.replace(
        WORKLOAD, model_mb=0.03, a=compute.a, b=compute.b, memory_slope_mb=0.0, dataset_mb=0.4, samples=1437, test_samples=360
    )
    profile = Profile(workload=workload, platform=world_profile(JOB.simulation, Limits()))
    bounds = ActionBounds(most_workers=4, quotas_mb=(MEMORY_MB,))
    plain = EpochModel(profile, bounds, batch_size=48, aggregators=2)
    runs = [measured_run(JOB, workers=w, memory_mb=MEMORY_MB, sync="hsp", batch_size=48, aggregators=2).epochs for w in (2, 4)]
    seconds, cost = plain.corrected(runs).corrections
    wanted = spec(
        profile=profile,
        bounds=bounds,
        batch_size=48,
        seconds=seconds,
        cost=cost,
        noise=QUIET,
        curve=dataclasses.replace(CURVE, samples=1437, batch_size=48),
    )
    said = schedule_errors(JOB, wanted, [(1, MEMORY_MB)] * 2 + [(2, MEMORY_MB)] * 2 + [(4, MEMORY_MB)] * 2)
    assert abs(float(str(said["error_s"]))) < 0.1
    assert abs(float(str(said["error_usd"]))) < 0.15
