"""Runs whose functions a learned policy chooses: what was decided is recorded, and weights follow from it alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from training_runs import WORLD, Run, make_job, real

from ephemeron.config.typed import plain
from ephemeron.events import FaultFired, GenerationStarted, Note
from ephemeron.prices import load_prices
from ephemeron.runs.cost import CostMeter
from ephemeron.training.job import JobLimits, Target, parse_fault
from ephemeron.training.job.generation import ScheduledResize
from ephemeron.training.task.learned_schedule import ActionBounds, Layer, LearnedPolicy, PolicyNetwork, StateScales

SCHEDULE = "ephemeron.training.task.learned_schedule:LearnedSchedule"
JOB = make_job(epochs=6, optimizer=Target(target="SGD", options={"lr": 0.05, "momentum": 0.9}))


def policy(memory_slope: float = 0.0) -> dict[str, Any]:
    """More functions the lower the loss is."""
    weights = ((-4.0, *[0.0] * 10), (memory_slope, *[0.0] * 10))
    network = PolicyNetwork(layers=(Layer(weights=weights, bias=(3.2, 0.0)),))
    bounds = ActionBounds(most_workers=6, quotas_mb=(1024, 1769, 3008))
    found = LearnedPolicy(
        network=network,
        bounds=bounds,
        budget_usd=1.0,
        epochs=6,
        memory_needed_mb=300.0,
        scales=StateScales(start_loss=2.4, target_loss=0.3, epoch_s=5.0, bounds=bounds),
    )
    return plain(found)


def learned(**how: Any) -> Run:
    return real(JOB, workers=2, batch_size=60, resize={"policy": Target(target=SCHEDULE, options={"policy": policy()})}, **how)


def changes(run: Run) -> list[tuple[int, int, int]]:
    return [(e.from_epoch, e.workers, e.memory_mb) for e in run.of(GenerationStarted)]


@pytest.mark.slow
def test_functions_change_by_the_policy_and_the_record_replays() -> None:
    run = learned(sync="bsp")
    assert run.ending.status == "finished", run.ending.causes
    made = run.of(GenerationStarted)
    assert len(made) >= 2
    assert [e.workers for e in made] == sorted({e.workers for e in made})
    entries = tuple(
        ScheduledResize(from_epoch=e.from_epoch, workers=e.workers, memory_mb=e.memory_mb, aggregators=e.aggregators) for e in made
    )
    replayed = real(JOB, workers=2, batch_size=60, sync="bsp", resize={"schedule": entries})
    assert changes(replayed) == changes(run)
    assert replayed.sha == run.sha


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 30])
def test_a_replacement_of_rank_0_keeps_to_what_was_agreed_on(at: int) -> None:
    """The weights of a run with a death are those of the schedule that it has recorded."""
    run = learned(sync="bsp", faults=[parse_fault(f"kill:rank=0,iteration={at},phase=compute")])
    assert run.of(FaultFired)
    assert run.ending.status == "finished", run.ending.causes
    entries = tuple(
        ScheduledResize(from_epoch=e.from_epoch, workers=e.workers, memory_mb=e.memory_mb, aggregators=e.aggregators)
        for e in run.of(GenerationStarted)
    )
    assert entries
    assert real(JOB, workers=2, batch_size=60, sync="bsp", resize={"schedule": entries}).sha == run.sha


def test_memory_changes_replace_all_functions_and_decisions_go_on() -> None:
    target = Target(target=SCHEDULE, options={"policy": policy(memory_slope=-1.0)})
    job = dataclasses.replace(JOB, epochs=6)
    run = real(job, workers=2, batch_size=60, sync="hsp", resize={"policy": target})
    assert run.ending.status == "finished", run.ending.causes
    made = changes(run)
    assert len({memory for _, _, memory in made}) >= 2
    assert all(b[0] > a[0] for a, b in itertools.pairwise(made))


def limited(budget_usd: float | None) -> tuple[Run, float]:
    """A run whose functions take long to start and change in number and memory; with its cost, as it is billed."""
    job = dataclasses.replace(JOB, simulation=dataclasses.replace(WORLD, cold_start_s=10.0), limits=JobLimits(budget_usd=budget_usd))
    target = Target(target=SCHEDULE, options={"policy": policy(memory_slope=-1.0)})
    run = real(job, workers=2, batch_size=60, sync="hsp", resize={"policy": target})
    meter = CostMeter(load_prices("objects"))
    for event in run.events:
        meter.feed(event)
    return run, meter.cost_usd(meter.ended_at)


@pytest.mark.slow
def test_a_schedule_never_spends_more_than_the_budget() -> None:
    """Cold starts, functions that were started ahead, and the stop itself are paid from the budget."""
    whole, cost = limited(None)
    assert whole.ending.status == "finished", whole.ending.causes
    for share, status in {0.3: "stopped", 0.5: "stopped", 0.8: "finished"}.items():
        run, spent = limited(share * cost)
        assert run.ending.status == status, run.ending.causes
        assert 0.85 * share * cost < spent <= share * cost
        assert any("the budget does not cover it" in e.text for e in run.of(Note))
