"""HSP: asynchronous within an epoch, a barrier at its end, where all ranks have the same parameters and decide alike."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
from training_runs import WORLD, make_job, real, synthetic

from ephemeron.errors import JobError
from ephemeron.events import Ended, Evaluated, FaultFired, Invoked, Measured, Progress
from ephemeron.training.driver.supervisor import Replace
from ephemeron.training.job import Target, parse_fault
from ephemeron.training.job.spec import EarlyStopping

LENGTH = 6
"""Iterations of an epoch."""
SHAPE = {"sync": "hsp", "workers": 4, "aggregators": 2, "samples": 64 * LENGTH, "epochs": 3, "checkpoint_every": 4}
SLOW = ["delay:rank=3,factor=4"]


def blind(trigger):
    """The client sees no deaths, so that ranks detect them."""
    original = trigger._read
    trigger._read = lambda event: [a for a in original(event) if not isinstance(a, Replace)]


def at_barriers(run):
    """By iteration, the number of contributions that each rank's parameters lack; distinct values."""
    found = defaultdict(dict)
    for e in run.of(Evaluated):
        found[e.iteration][e.rank] = e.sums["loss"][0]
    return found


@pytest.mark.parametrize("faults", [[], SLOW, [*SLOW, "kill:rank=0,iteration=7"], ["kill:rank=3,iteration=5,phase=upload"]], ids=str)
def test_at_a_barrier_every_rank_has_every_contribution_of_the_epochs_before_and_no_other(faults):
    run = synthetic(counting=True, faults=faults, **SHAPE)
    assert (run.ending.arrays["counts"] == 1).all()
    tables, world = 2, 4
    for epoch in (1, 2, 3):
        left = tables * world * LENGTH * (3 - epoch)
        assert at_barriers(run)[LENGTH * epoch] == dict.fromkeys(range(world), left)
    assert all(e.version == e.iteration for e in run.of(Progress) if e.iteration % LENGTH == 0)
    assert any(e.version < e.iteration for e in run.of(Progress)), "between barriers no rank waits"


def test_no_rank_is_replaced_because_it_waited_at_a_barrier():
    """The fast ranks send nothing for most of each epoch, which is longer than the timeout."""
    slow = dataclasses.replace(WORLD, compute={"a": 160.0, "b": 4.0, "m": 0.0})
    run = synthetic(counting=True, world=slow, faults=["delay:rank=3,factor=11"], until=blind, **SHAPE)
    epoch_s = run.trigger.ledger.ended_at / 3
    assert epoch_s > 3 * run.trigger.spec.peer_timeout_s
    assert not [e for e in run.of(Invoked) if e.reason == "replacement"]
    assert (run.ending.arrays["counts"] == 1).all()


def test_a_rank_hands_off_while_it_waits_at_a_barrier_and_its_successor_evaluates():
    world = dataclasses.replace(WORLD, cold_start_s=0.05)
    run = synthetic(counting=True, function_timeout_s=4.0, faults=["delay:rank=3,factor=3"], world=world, **SHAPE)
    assert run.ending.status == "finished"
    assert "relayed" in [e.outcome for e in run.of(Ended)]
    assert (run.ending.arrays["counts"] == 1).all()
    assert {t: set(by_rank) for t, by_rank in at_barriers(run).items()} == {LENGTH * e: {0, 1, 2, 3} for e in (1, 2, 3)}
    assert run.left == {"run/spec", "run/result"}


def test_a_rank_that_waits_at_a_barrier_stops_with_the_others():
    run = synthetic(faults=SLOW, until=lambda trigger: trigger.stop_requested.set(), **{**SHAPE, "epochs": 30})
    assert run.ending.status == "stopped"
    assert len(run.of(Invoked)) == 4
    assert not run.trigger.supervisor.running


EARLY = EarlyStopping(monitor="accuracy", mode="max", patience=1, min_delta=1.0)


def test_evaluations_at_barriers_may_decide():
    run = real(make_job(epochs=6, early_stopping=EARLY), sync="hsp", faults=[])
    decided = [e for e in run.of(Measured) if e.decision]
    assert len(decided) == 1
    assert decided[0].epoch == 2, "the first one after the best"
    assert run.ending.final.iterations == decided[0].iteration


def test_evaluations_elsewhere_may_not():
    with pytest.raises(JobError, match="at the ends of epochs") as refused:
        real(make_job(epochs=6, early_stopping=EARLY, evaluate_every="5 steps"), sync="hsp")
    assert "1 epoch" in str(refused.value)
    real(make_job(epochs=1, evaluate_every="5 steps"), sync="hsp")


@pytest.mark.parametrize(
    ("says", "how"),
    [
        ("sync 'hsp' needs aggregating workers", {"pattern": "parameter-server"}),
        ("sync 'hsp' does not wait", {"pattern": "pipelined"}),
        ("under 'hsp' would undo", {"exchange": {"quantity": "parameters"}}),
    ],
)
def test_what_has_no_meaning_is_refused(says, how):
    with pytest.raises(JobError, match=says):
        real(make_job(), sync="hsp", **how)


@pytest.mark.slow
def test_a_killed_run_learns():
    optimizer = Target(target="SGD", options={"lr": 0.05, "momentum": 0.9})
    job = make_job(epochs=8, model=Target(target="tiny:mlp", options={"hidden": 64}), optimizer=optimizer)
    kills = [parse_fault(f"kill:rank={r},iteration={t},phase=upload") for r, t in ((2, 13), (0, 40))]
    run = real(job, sync="hsp", checkpoint_every=5, faults=kills)
    assert len(run.of(FaultFired)) == 2
    assert run.ending.final.metrics["accuracy"] > 0.93
