"""HAP converges: on digits, three seeds, final accuracy within half a point of BSP at equal epochs."""

from __future__ import annotations

from statistics import mean

import pytest
from training_runs import make_job, real

from ephemeron.training.job import Target


@pytest.fixture(scope="module")
def accuracy():
    def run(sync: str, seed: int, lr: float = 0.05, **how) -> float:
        optimizer = Target(target="SGD", options={"lr": lr, "momentum": 0.9})
        model = Target(target="tiny:mlp", options={"hidden": 64})
        job = make_job(seed=seed, epochs=8, model=model, optimizer=optimizer, **{k: how.pop(k) for k in ["staleness"] if k in how})
        return real(job, sync=sync, **how).ending.final.metrics["accuracy"]

    return run


@pytest.mark.slow
def test_hap_is_as_accurate_as_bsp(accuracy):
    how, seeds = {"lr": 0.05, "nonaggregator_batch_size": 24}, (0, 1, 2)
    bsp, hap = (mean(accuracy(sync, s, **how) for s in seeds) for sync in ("bsp", "hap"))
    assert bsp > 0.95
    assert hap >= bsp - 0.005


@pytest.mark.slow
def test_gradients_at_stale_parameters_do_harm_where_provisional_steps_do_not(accuracy):
    how = {"lr": 0.4, "aggregators": 1}
    bsp, stale, remedied = (accuracy("bsp", 0, **how), accuracy("hap", 0, staleness="none", **how), accuracy("hap", 0, **how))
    assert stale < bsp - 0.2
    assert remedied > bsp - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["ssp:3", "asp", "hsp"])
def test_asynchronous_protocols_learn(sync, accuracy):
    """Staleness asks for smaller steps."""
    assert accuracy(sync, 0, lr=0.03) > 0.93


@pytest.mark.slow
def test_an_asynchronous_parameter_server_learns():
    job = make_job(epochs=12, optimizer=Target(target="SGD", options={"lr": 0.05}))
    run = real(job, pattern="parameter-server", sync="asp")
    assert run.ending.final.metrics["accuracy"] > 0.93
