"""Calibration runs: which are chosen, what their events say, and the coefficients that they determine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ephemeron.errors import JobError
from ephemeron.events import Progress, Started, Traffic
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.job import Configuration, DataSpec, Job, Target
from ephemeron.training.job.spec import EarlyStopping, KeepBest, SchedulerSpec
from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import PlatformProfile, Workload
from ephemeron.training.planner.model.rates import Affine, Transfer
from ephemeron.training.profiling.calibration import (
    WARMING,
    CalibrationResult,
    CalibrationRun,
    calibrate,
    iterations_of,
    measured,
    parts,
    unmonitored,
)

WORK = Workload(
    model_mb=2.0, a=2.0, b=3.0, m=-20.0, memory_slope_mb=0.3, memory_base_mb=400, dataset_mb=1, samples=2000, vcpus=1.0, apply_s=0.001
)
RATE = Affine(latency_s=0.002, mb_s=500)
PLACE = PlatformProfile(
    name="local", price_gb_s=1e-5, price_invocation=0, poll_s=0.0002, transfer=(Transfer(memory_mb=1769, up=RATE, down=RATE),)
)
LINKED = dataclasses.replace(PLACE, links=DirectLinks(latency_s=0.001, mb_s=500.0))
CODE = Path(__file__).parents[1] / "code"
LIMITS = Limits(memory_max_mb=8192, concurrency=100)


def test_many_with_small_and_large_batches_and_two():
    found = parts(WORK, PLACE, batches=(8, 700), cores=2, limits=LIMITS)
    assert [p.workers for p in found] == [4, 4, 2]
    assert found[0].memory_mb == found[1].memory_mb == 704
    assert found[2].memory_mb == 1408
    assert found[0].batch == 16 < found[2].batch < found[1].batch
    assert all(sum([p.memory_mb] * p.workers) <= 0.8 * 2 * 1769 for p in found)


@pytest.mark.parametrize(("cores", "concurrency"), [(1, 1), (1, 100)])
def test_a_machine_without_room_for_two_functions_calibrates_nothing(cores, concurrency):
    large = dataclasses.replace(WORK, memory_base_mb=900.0)
    assert parts(large, PLACE, batches=(8, 64), cores=cores, limits=Limits(concurrency=concurrency)) == []


def test_where_functions_have_links_one_more_run_is_over_them():
    found = parts(WORK, LINKED, batches=(8, 700), cores=2, limits=LIMITS)
    assert [p.direct for p in found] == [False, False, False, True]
    assert found[-1] == dataclasses.replace(found[0], aggregators=4, direct=True)


def test_slow_steps_have_fewer_calibration_iterations():
    part = CalibrationRun(workers=2, aggregators=1, memory_mb=1408, batch=32)
    slow = dataclasses.replace(WORK, a=200.0)
    assert iterations_of(slow, part) < iterations_of(WORK, part)


def run_events(*, cold: bool = True) -> list[Started | Progress]:
    """Two functions, the second one starts later and is slower; ten iterations of 0.5 s, the last one partial."""
    events: list[Started | Progress] = []
    for rank in (0, 1):
        t = 2.0 + rank
        events.append(Started(t=t, rank=rank, attempt=0, invocation=str(rank), cold=cold))
        for i in range(10):
            t = 4.0 + 0.5 * i
            step = (0.1, 0.3)[rank] if i >= WARMING else 9.0
            samples = 8 if i < 9 else 3
            spans = [("compute", t, t + step), ("wait", t + step, t + 0.4), ("compute", t + 0.4, t + 0.41)]
            progress = Progress(
                t=t + 0.5,
                rank=rank,
                attempt=0,
                iteration=i,
                epoch=0,
                samples=samples,
                loss=1.0,
                version=i,
                spans=spans,
                cpu_s=0.2 * i,
                traffic=Traffic(gets=4 * i, polls=2 * i),
            )
            events.append(progress)
    return events


def test_what_events_say():
    part = CalibrationRun(workers=2, aggregators=1, memory_mb=1408, batch=8)
    r = measured(part, run_events())
    assert r.started_s == 3.0
    assert r.first_s == pytest.approx(5.0 - 3.0)
    assert r.iteration_s == pytest.approx(0.5)
    assert r.step_s == pytest.approx(0.2)
    assert r.scatter == pytest.approx(0.5)
    assert r.cpu_s == pytest.approx(0.2)
    assert r.polls_per_get == pytest.approx(0.5)
    assert measured(part, run_events(cold=False)).started_s == 0.0


@pytest.mark.parametrize(("where", "lockstep_cpu_s", "direct_s"), [("store", 0.0, None), ("store", 0.02, None), ("links", 0.02, 0.005)])
def test_coefficients_are_found_again(where, lockstep_cpu_s, direct_s):
    truth = dataclasses.replace(WORK, a=1.6, lockstep_cpu_s=lockstep_cpu_s, first_cpu_s=0.05, direct_lockstep_cpu_s=direct_s)
    done = []
    profiled = LINKED if where == "links" else PLACE
    for part in parts(WORK, profiled, batches=(8, 700), cores=2, limits=LIMITS):
        p = predict(
            truth,
            profiled.over_links() if part.direct else profiled,
            ExecutionOptions(),
            workers=part.workers,
            memory_mb=part.memory_mb,
            aggregators=part.aggregators,
            batch=part.batch,
            other_batch=part.batch,
        )
        iteration_s, share = float(p.iteration_s), part.memory_mb / PLACE.mb_per_vcpu
        result = CalibrationResult(
            part=part,
            started_s=1.5 * part.workers,
            first_s=2 * iteration_s + 0.05 / share,
            iteration_s=iteration_s,
            step_s=float(truth.compute_s(part.batch, part.memory_mb)),
            scatter=0.1,
            cpu_s=0.0,
            polls_per_get=PLACE.polls_per_get,
        )
        done.append(result)
    found, place, note = calibrate(WORK, profiled, done)
    assert found.a == pytest.approx(truth.a)
    assert found.lockstep_cpu_s == pytest.approx(lockstep_cpu_s, abs=1e-8)
    assert found.direct_lockstep_cpu_s == (None if direct_s is None else pytest.approx(direct_s, abs=1e-8))
    assert found.first_cpu_s == pytest.approx(0.05)
    assert (place.start_each_s, place.polls_per_get) == (pytest.approx(1.5), PLACE.polls_per_get)
    assert [row.predicted_s for row in note.runs] == pytest.approx([r.iteration_s for r in done], abs=1e-5)


def test_a_calibration_run_waits_for_no_metric():
    """It evaluates nothing, and a job that decides by a metric would be refused."""
    job = Job(
        name="monitored",
        model=Target(target="tiny:mlp"),
        data=DataSpec(),
        epochs=1,
        code=(CODE,),
        early_stopping=EarlyStopping(),
        keep_best=KeepBest(),
        scheduler=SchedulerSpec(target="ReduceLROnPlateau", monitor="loss"),
    )
    configuration = Configuration(workers=2, memory_mb=1769, function_timeout_s=900.0).resolved()
    how = {"run_id": "run", "limits": LIMITS, "prices": load_prices("objects"), "only_first": 64}
    with pytest.raises(JobError, match="need evaluation data"):
        prepare(job, configuration, **how)
    assert prepare(unmonitored(job), configuration, **how).spec.samples == 64
