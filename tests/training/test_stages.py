"""A model divided among functions trains as the whole one does, whoever dies."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch
from training_runs import WORLD, configuration, make_job, real, simulate

from ephemeron.channels.keys import Keys
from ephemeron.events import Ended, FaultFired, Invoked, Progress
from ephemeron.job import Target
from ephemeron.platforms.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.prepare import prepare
from ephemeron.training.supervisor import Replace

SHAPE = {"batch_size": 120, "checkpoint_every": 3}
"""12 iterations; 6 with two replicas."""


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def prepared(stages=2, replicas=1, micro_batches=1, model="tiny:mlp", options=(), lifetime_s=900.0, **more):
    job = make_job(dtype="float64", model=Target(target=model, options=dict(options)))
    c = configuration(
        **{**SHAPE, **more}, stages=stages, workers=stages * replicas, micro_batches=micro_batches,
        aggregators=min(2, replicas), lifetime_s=lifetime_s,
    )  # fmt: skip
    return prepare(
        job, c, run_id="run", limits=Limits(), prices=load_prices("objects"), cold_start_s=WORLD.cold_start_s
    )


def staged(faults=(), *, world=WORLD, until=None, budget_usd=None, **how):
    ready = prepared(**how)
    spec = dataclasses.replace(ready.spec, faults=tuple(faults), budget_usd=budget_usd)
    objects = {**ready.objects, Keys("run").spec: [spec.to_bytes()]}
    return simulate(dataclasses.replace(ready, spec=spec, objects=objects), world=world, until=until)


@cache
def undisturbed(**how):
    return staged(**how).sha


def left(stages):
    return {"run/spec", "run/result", *(f"run/part/{s}" for s in range(stages))}


@cache
def whole(model="tiny:mlp", **how):
    job = make_job(dtype="float64", model=Target(target=model))
    return real(job, workers=how.pop("workers", 1), aggregators=1, batch_size=120, **how).ending


@pytest.mark.parametrize(
    "how",
    [
        {"stages": 2},
        {"stages": 2, "micro_batches": 4},
        {"stages": 2, "micro_batches": 4, "schedule": "gpipe"},
        {"stages": 3, "micro_batches": 2},
    ],
    ids=str,
)
def test_stages_equal_the_whole_model(how):
    run, expected = staged(**how), whole()
    assert run.sha
    assert set(run.ending.arrays) == set(expected.arrays)
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)
    for name, value in expected.final["metrics"].items():
        assert run.ending.final["metrics"][name] == pytest.approx(value, abs=1e-12)
    assert run.left == left(how["stages"])


def test_replicas_equal_as_many_whole_models():
    run, expected = staged(replicas=2, micro_batches=2), whole(workers=2)
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)
    losses = {}
    for e in run.of(Progress):
        losses.setdefault((e.iteration, e.rank % 2), set()).add(e.loss)
    assert all(len(found) == 1 and found != {0.0} for found in losses.values())  # every stage hears of the loss


KILLS = [
    (rank, iteration, phase)
    for k, (rank, phase) in enumerate(
        [(r, p) for r in range(4) for p in ("load", "compute", "upload", "download", "aggregate")]
    )
    for iteration in [(0, 4, 5)[k % 3]]
]


@pytest.mark.parametrize(("rank", "iteration", "phase"), KILLS)
def test_a_function_is_killed(rank, iteration, phase):
    how = {"replicas": 2, "micro_batches": 2, "model": "tiny:mlp", "options": (("dropout", 0.3),)}
    run = staged([f"kill:rank={rank},iteration={iteration},phase={phase}"], **how)
    assert len(run.of(FaultFired)) == 1
    assert run.sha == undisturbed(**how)
    assert run.left == left(2)
    assert len(run.of(Invoked)) == 5


def blind(trigger):
    """The client does not see who dies."""
    original = trigger._read
    trigger._read = lambda event: [a for a in original(event) if not isinstance(a, Replace)]


QUICK = {"stages": 3, "micro_batches": 2, "options": (("dropout", 0.3),)}


@pytest.mark.parametrize("rank", range(3))
def test_stages_find_out_by_themselves_who_is_dead(rank):
    run = staged([f"kill:rank={rank},iteration=6,phase=compute"], until=blind, **QUICK)
    assert len(run.of(FaultFired)) == 1
    assert run.sha == undisturbed(**QUICK)
    assert len(run.of(Invoked)) == 4  # nobody who only waited was replaced
    assert {e.rank for e in run.of(Invoked) if e.attempt} == {rank}


@pytest.mark.parametrize("iteration", [0, 7, 11])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_letter_is_lost(rank, iteration):
    run = staged([f"drop-put:rank={rank},iteration={iteration}"], **QUICK)
    assert len(run.of(FaultFired)) == 1
    assert run.sha == undisturbed(**QUICK)


def test_a_call_is_delivered_twice():
    run = staged(["duplicate:rank=1"], **QUICK)
    assert [e.outcome for e in run.of(Ended)].count("duplicate") == 1
    assert run.sha == undisturbed(**QUICK)


def test_lifetimes_in_a_row_and_a_kill_among_them():
    world = dataclasses.replace(WORLD, cold_start_s=0.05)
    run = staged(["kill:rank=1,iteration=8,phase=download"], world=world, lifetime_s=12.0, **QUICK)
    assert max(e.attempt for e in run.of(Invoked)) >= 3
    assert run.sha == undisturbed(**QUICK)
    assert not [key for key in run.left if "/x/" in key or "/g" in key or "/state/" in key]


def test_letters_do_not_pile_up():
    run = staged(**QUICK)
    each = 2 * 2 * 2  # borders, directions, micro-batches
    assert run.most_objects < 3 * SHAPE["checkpoint_every"] * each + 40
    assert run.trigger.ledger.traffic.puts > 12 * each


def test_all_stop_after_the_same_iteration():
    run = staged(budget_usd=5e-4, **QUICK)
    assert run.ending.status == "stopped"
    assert {e.outcome for e in run.of(Ended)} == {"stopped"}
    done = {r: max(e.iteration for e in run.of(Progress) if e.rank == r) for r in range(3)}
    assert len(set(done.values())) == 1


def test_a_layer_on_two_stages_has_the_sum_of_its_gradients():
    run, expected = staged(stages=2, model="tiny:tied"), whole("tiny:tied")
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)
    again = staged(["kill:rank=0,iteration=8,phase=upload"], stages=2, model="tiny:tied")
    assert again.sha == run.sha


def test_running_statistics_survive_a_kill():
    how = {"stages": 2, "replicas": 2, "micro_batches": 2, "model": "tiny:with_batch_norm"}
    run = staged(["kill:rank=2,iteration=4,phase=compute", "kill:rank=0,iteration=5,phase=upload"], **how)
    assert len(run.of(FaultFired)) == 2
    assert run.sha == undisturbed(**how)
    assert run.ending.arrays["2.num_batches_tracked"] == 12
