"""HAP, SSP and ASP with provisional steps: the same weights as an independent simulation, after any kill, and a warning."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from benchmarks.stale_training import Setting, shapes_of, train
from training_runs import WORLD, make_job, real

from ephemeron.events import Ended, FaultFired, RunStarted
from ephemeron.training.job import Target, parse_fault
from ephemeron.training.job.convergence import TESTED_STALENESS, TESTED_WORKERS, outside_region

MLP = Target(target="tiny:mlp", options={"hidden": 64})
SGD = Target(target="SGD", options={"lr": 0.05, "momentum": 0.9})
OPTIMIZERS = {
    "sgd": SGD,
    "nesterov": Target(target="SGD", options={"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "adam": Target(target="Adam", options={"lr": 0.003}),
    "adamw": Target(target="AdamW", options={"lr": 0.003}),
}
DROPOUT = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.3}), optimizer=OPTIMIZERS["adam"])


@pytest.mark.parametrize(("staleness", "remedy"), [("auto", "local"), ("none", "none")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_weights_are_those_of_an_independent_simulation(kind, staleness, remedy):
    job = make_job(seed=1, model=MLP, optimizer=OPTIMIZERS[kind], staleness=staleness)
    run = real(job, sync="hap", aggregators=1, nonaggregator_batch_size=24)
    weights = np.concatenate([np.ravel(run.ending.arrays[name]) for name, _ in shapes_of("mlp")])
    (expected,) = train(
        [
            Setting(
                seed=1,
                model="mlp",
                optimizer=kind,
                lr=OPTIMIZERS[kind].options["lr"],
                aggregators=1,
                nonaggregator_batch=24,
                epochs=1,
                remedy=remedy,
            )
        ]
    )
    np.testing.assert_allclose(weights, expected.weights, rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def undisturbed():
    return real(DROPOUT, sync="hap").sha


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["compute", "upload", "download"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_function_is_killed(rank, phase, undisturbed):
    kill = parse_fault(f"kill:rank={rank},iteration=13,phase={phase}")
    run = real(DROPOUT, sync="hap", checkpoint_every=5, faults=[kill])
    assert run.of(FaultFired)
    assert run.sha == undisturbed


@pytest.mark.slow
def test_hand_offs_take_own_gradients_along(undisturbed):
    job = dataclasses.replace(DROPOUT, simulation=dataclasses.replace(WORLD, cold_start_s=0.05))
    run = real(job, sync="hap", function_timeout_s=3.0)
    assert "relayed" in [e.outcome for e in run.of(Ended)]
    assert run.sha == undisturbed


@pytest.mark.slow
def test_bsp_has_nothing_to_step_provisionally():
    runs = {s: real(make_job(staleness=s), checkpoint_every=5).sha for s in ("auto", "none")}
    assert runs["auto"] == runs["none"]
    assert real(make_job(), sync="hap", aggregators=4).sha == real(make_job(), aggregators=4).sha


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ssp:2", "asp"])
def test_asynchronous_runs_survive_a_kill(sync):
    kill = parse_fault("kill:rank=2,iteration=13,phase=compute")
    run = real(make_job(model=MLP, optimizer=SGD, epochs=6), sync=sync, checkpoint_every=5, faults=[kill])
    assert run.of(FaultFired)
    assert run.ending.final.metrics["accuracy"] > 0.9


def notes_of(run):
    return [text for e in run.of(RunStarted) for text in e.notes if "may be less accurate" in text]


@pytest.mark.slow
def test_a_launch_outside_the_tested_region_has_a_note():
    large = make_job(optimizer=Target(target="SGD", options={"lr": 0.5, "momentum": 0.9}))
    (note,) = notes_of(real(large, sync="hap"))
    assert "learning rate / (1 − momentum) 5 is above" in note
    assert not notes_of(real(large))
    assert not notes_of(real(make_job(optimizer=SGD), sync="hap"))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"optimizer": Target(target="SGD", options={"lr": 0.001, "momentum": 0.99})}, "momentum 0.99 is above"),
        ({"optimizer": Target(target="Adam", options={"lr": 0.1})}, "learning rate 0.1 is above"),
        ({"optimizer": Target(target="Adagrad", options={"lr": 0.01})}, "optimizer Adagrad was not tested"),
        ({"sync": f"ssp:{TESTED_STALENESS + 1}"}, "the tested staleness is at most"),
        ({"workers": TESTED_WORKERS + 1}, "workers were tested"),
        ({"exchange": "parameters"}, "exchange 'parameters' was not tested"),
        ({"staleness": "none"}, "computes gradients at stale parameters"),
        ({"sync": "asp", "pattern": "parameter-server"}, "asynchronous parameter server"),
    ],
    ids=str,
)
def test_the_region_ends_somewhere(values, reason):
    inside = {"optimizer": SGD, "sync": "hap", "workers": 4}
    assert outside_region(**inside) == ""
    assert reason in outside_region(**{**inside, **values})
    assert outside_region(**{**inside, **values, "sync": "bsp"}) == ""
