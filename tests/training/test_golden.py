"""Promise 1 and 3: W workers under BSP equal one worker on the same global batch; two runs are bit-identical."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training_runs import configuration, make_job, real

from ephemeron.data import assign, global_batch, load, plan_split
from ephemeron.training.job import Target


def one_worker(job, c, dtype):
    """Plain PyTorch on the global batches that the workers see together."""
    import sys

    sys.path.insert(0, str(job.code[0]))
    import tiny

    data = load(job.data, seed=job.seed).train
    split = plan_split(len(data), [c.batch_of(r) for r in range(c.workers)])
    owned = assign(len(data), split, job.seed)
    torch.manual_seed(job.seed)
    model = getattr(tiny, job.model.target.split(":")[1])(**job.model.options).to(dtype)
    optimizer = getattr(torch.optim, job.optimizer.target)(model.parameters(), **job.optimizer.options)
    for epoch in range(job.epochs):
        for iteration in range(split.iterations):
            part = data.take(global_batch(split, owned, epoch, iteration, seed=job.seed))
            loss = torch.nn.functional.cross_entropy(model(torch.tensor(part.inputs).to(dtype)), torch.tensor(part.targets))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {n: t.detach().numpy() for n, t in model.state_dict().items()}


SGD = Target(target="SGD", options={"lr": 0.1, "momentum": 0.9})
ADAM = Target(target="Adam")


@pytest.mark.parametrize(
    ("optimizer", "how"),
    [
        (SGD, {"workers": 2, "aggregators": 1}),
        (SGD, {"workers": 3, "aggregators": 2, "batch_size": 7, "nonaggregator_batch_size": 19}),
        (ADAM, {"workers": 3, "aggregators": 2, "batch_size": 7, "nonaggregator_batch_size": 19}),
        (ADAM, {"workers": 4, "aggregators": 4}),
        (SGD, {"workers": 4, "aggregators": 2, "pattern": "pipelined"}),
        (ADAM, {"workers": 4, "aggregators": 2, "pattern": "pipelined"}),
        (SGD, {"workers": 3, "aggregators": 2, "pattern": "parameter-server"}),
        (ADAM, {"workers": 1, "pattern": "standalone"}),
    ],
    ids=lambda value: value.target if isinstance(value, Target) else str(value),
)
def test_float64_equals_one_worker(how, optimizer):
    job = make_job(dtype="float64", optimizer=optimizer)
    run = real(job, **how)
    expected = one_worker(job, configuration(**how), torch.float64)
    for name, value in expected.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10)


DECAYING = [
    Target(target="AdamW", options={"lr": 0.01, "weight_decay": 0.1}),
    Target(target="SGD", options={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", DECAYING, ids=["AdamW", "SGD"])
@pytest.mark.parametrize(
    "how",
    [
        {"workers": 3, "aggregators": 2, "batch_size": 3, "nonaggregator_batch_size": 5},
        {"workers": 3, "aggregators": 2, "batch_size": 4, "pattern": "pipelined"},
        {"workers": 3, "aggregators": 2, "batch_size": 4, "pattern": "parameter-server"},
        {"workers": 1, "aggregators": 1, "batch_size": 12},
        {"workers": 1, "aggregators": 1, "batch_size": 12, "exchange": {"quantity": "parameters"}},
    ],
    ids=str,
)
def test_a_parameter_without_gradient_is_passed_over_as_in_plain_pytorch(how, optimizer):
    job = make_job(dtype="float64", optimizer=optimizer, model=Target(target="tiny:branching"))
    run = real(job, **how)
    expected = one_worker(job, configuration(**how), torch.float64)
    for name, value in expected.items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    "how",
    [
        {"workers": 2, "aggregators": 1, "exchange": {"compression": "int8"}},
        {"workers": 2, "aggregators": 1, "exchange": {"compression": "bf16"}},
        {"workers": 2, "aggregators": 1, "exchange": {"quantity": "parameters"}},
        {"workers": 4, "aggregators": 1, "stages": {"count": 2, "micro_batches": 2}},
        {"workers": 2, "aggregators": 2, "sync": "asp"},
        {"workers": 2, "aggregators": 1, "sync": "asp", "pattern": "parameter-server"},
    ],
    ids=str,
)
def test_a_layer_that_nothing_uses_stays_as_it_was(how):
    job = make_job(optimizer=DECAYING[0], model=Target(target="tiny:unused"))
    run = real(job, **{"batch_size": 120, **how})
    torch.manual_seed(job.seed)
    import tiny

    for name, value in tiny.unused().state_dict().items():
        # One step's decay is 1e-3 of a weight; a weighted mean of equal parameters rounds.
        same = np.allclose(run.ending.arrays[name], value.numpy(), rtol=1e-6, atol=0)
        assert same == name.startswith("unused"), name


def test_float32_equals_one_worker_to_1e_4():
    job = make_job()
    run = real(job, workers=4, aggregators=2)
    for name, value in one_worker(job, configuration(workers=4), torch.float32).items():
        np.testing.assert_allclose(run.ending.arrays[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sync", ["bsp", "hap"])
def test_two_runs_are_bit_identical(sync):
    job = make_job(model=Target(target="tiny:mlp", options={"dropout": 0.3}))
    assert real(job, sync=sync).sha == real(job, sync=sync).sha


def test_patterns_give_the_same_bits():
    shas = {
        real(make_job(), workers=4, **how).sha
        for how in (
            {"pattern": "all-reduce"},
            {"pattern": "scatter-reduce"},
            {"aggregators": 3},
            {"pattern": "pipelined"},
            {"pattern": "parameter-server"},
        )
    }
    assert len(shas) == 1


def test_another_seed_gives_other_weights():
    assert real(make_job(seed=1)).sha != real(make_job(seed=2)).sha


def test_exchanging_parameters_averages_them():
    job = make_job(dtype="float64")
    same_start = real(job, exchange={"quantity": "parameters"}, workers=2, aggregators=1)
    gradients = real(job, exchange={"quantity": "gradients"}, workers=2, aggregators=1)
    assert same_start.sha != gradients.sha  # momentum stays local, so it is another algorithm
    assert same_start.ending.final.metrics["accuracy"] > 0.5


@pytest.mark.slow
def test_plain_sgd_with_parameters_equals_gradients():
    """Without momentum, averaging parameters after a step is averaging gradients before it."""
    job = make_job(dtype="float64", optimizer=Target(target="SGD", options={"lr": 0.1}))
    a = real(job, exchange={"quantity": "parameters"}).ending.arrays
    b = real(job, exchange={"quantity": "gradients"}).ending.arrays
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-10)


def test_batch_norm_keeps_each_rank_s_own_statistics():
    """Documented: running statistics are local, the result holds rank 0's."""
    run = real(make_job(model=Target(target="tiny:with_batch_norm")))
    assert run.ending.arrays["2.num_batches_tracked"] == 23
    assert run.ending.arrays["2.running_var"].min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_compressed_runs_converge_and_repeat(compression):
    run = real(make_job(epochs=2), exchange={"compression": compression})
    plain = real(make_job(epochs=2))
    assert run.sha == real(make_job(epochs=2), exchange={"compression": compression}).sha
    assert abs(run.ending.final.metrics["accuracy"] - plain.ending.final.metrics["accuracy"]) < 0.03
    assert run.trigger.ledger.traffic.bytes_up < (0.75 if compression == "bf16" else 0.7) * plain.trigger.ledger.traffic.bytes_up
