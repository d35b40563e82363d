"""The trainer compared with plain PyTorch: steps, what is exchanged, evaluation."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch import nn  # noqa: E402
from torch_trainers import (  # noqa: E402
    BATCHES,
    CLASSES,
    DATA,
    NOTHING,
    OPTIMIZERS,
    RNG,
    SGD,
    Batches,
    Frozen,
    Mixed,
    assert_alike,
    everything,
    half,
    iterate,
    linear,
    plain,
    program,
    seeded,
    trainer,
)

from ephemeron.data import Samples  # noqa: E402
from ephemeron.data.batch_source import ArrayBatchSource  # noqa: E402
from ephemeron.runs.metrics import EvaluationSums  # noqa: E402
from ephemeron.training.tensors import digest  # noqa: E402
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer  # noqa: E402

# -- one worker is plain PyTorch --------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_worker_is_plain_pytorch(optimizer):
    t = trainer(optimizer=optimizer)
    losses = iterate(t, range(8))
    model, expected = plain(linear, optimizer, range(8))
    assert_alike(t.model, model, rtol=2e-5, atol=2e-6)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_one_worker_is_plain_pytorch_with_parameters_of_two_dtypes():
    t = trainer(Mixed)
    assert t.dtype == np.float64
    iterate(t, range(8))
    model, _ = plain(Mixed, SGD, range(8))
    assert t.model.body.weight.dtype == torch.float32
    assert t.model.head.weight.dtype == torch.float64
    assert_alike(t.model, model, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("build", "exchanged"),
    [
        (linear, np.float32),
        (lambda: linear().double(), np.float64),
        (half, np.float32),
        (lambda: linear().half(), np.float32),
        (lambda: Mixed(torch.bfloat16), np.float32),
        (Mixed, np.float64),
    ],
    ids=["float32", "float64", "bf16", "float16", "bf16 and float32", "float64 and float32"],
)
def test_the_widest_dtype_travels_and_never_less_than_float32(build, exchanged):
    t = trainer(build)
    assert t.dtype == exchanged
    assert t.compute(0).vector.dtype == exchanged
    assert t.parameters().dtype == exchanged
    assert t.size == sum(p.numel() for p in t.model.parameters())


def test_the_vector_is_the_sum_over_the_batch():
    a, b = trainer(batches=[np.arange(5)]), trainer(batches=[np.array([i]) for i in range(5)])
    whole = a.compute(0).vector.copy()
    single = sum(b.compute(i).vector.copy() for i in range(5))
    np.testing.assert_allclose(whole, single, rtol=1e-4, atol=1e-5)


def test_two_workers_with_unequal_batches_are_one():
    both = trainer(batches=[np.arange(8)])
    iterate(both, [0])
    pair = [trainer(batches=[np.arange(3)]), trainer(batches=[np.arange(3, 8)])]
    steps = [t.compute(0) for t in pair]
    mean = sum(s.vector for s in steps) / np.float32(sum(s.samples for s in steps))
    for t in pair:
        t.apply(mean)
        np.testing.assert_allclose(t.parameters(), both.parameters(), rtol=1e-5, atol=1e-6)


def test_a_merged_vector_may_be_read_only():
    t, other = trainer(), trainer()
    mean = t.compute(0).vector / np.float32(5)
    other.compute(0)
    other.apply(mean.copy())
    mean.flags.writeable = False
    t.apply(mean)
    np.testing.assert_array_equal(t.parameters(), other.parameters())


def test_an_unused_parameter_counts_as_no_gradient():
    class Unused(Frozen):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    t = trainer(Unused)
    before = t.model.spare.weight.detach().clone()
    iterate(t, range(3))
    assert torch.equal(t.model.spare.weight, before)


def test_frozen_parameters_neither_travel_nor_change_but_belong_to_the_weights():
    t = trainer(Frozen)
    frozen = t.model.body.weight.detach().clone()
    assert t.size == 8 * CLASSES + CLASSES
    iterate(t, range(4))
    assert torch.equal(t.model.body.weight, frozen)
    assert set(t.weights()[0]) == {"body.weight", "body.bias", "head.weight", "head.bias"}
    model, _ = plain(Frozen, SGD, range(4))
    assert_alike(t.model, model, rtol=2e-5, atol=2e-6)


# -- parameters and changes -------------------------------------------------------------------------------


def test_exchanging_parameters_one_worker_is_plain_pytorch():
    t = trainer(exchange="parameters")
    iterate(t, range(6))
    model, _ = plain(linear, SGD, range(6))
    assert_alike(t.model, model, rtol=2e-5, atol=2e-6)


def test_exchanging_parameters_the_vector_is_what_was_learnt_times_the_samples():
    t = trainer(exchange="parameters")
    step = t.compute(0)
    np.testing.assert_allclose(step.vector, t.parameters() * np.float32(5), rtol=1e-6)
    t.apply(np.arange(t.size, dtype=np.float32))
    np.testing.assert_array_equal(t.parameters(), np.arange(t.size))


@pytest.mark.parametrize("build", [half, Mixed], ids=["bf16", "mixed"])
def test_parameters_of_other_dtypes_are_exchanged_too(build):
    t = trainer(build, exchange="parameters")
    kinds = [p.dtype for p in t.model.parameters()]
    iterate(t, range(3))
    assert [p.dtype for p in t.model.parameters()] == kinds
    t.apply(np.full(t.size, 0.5, dtype=t.dtype))
    assert (t.parameters() == 0.5).all()


def test_exchanging_changes_the_vector_is_what_the_step_changed():
    t = trainer(exchange="changes")
    before = t.parameters()
    delta = t.compute(0).vector.copy()
    assert delta.any()
    np.testing.assert_array_equal(delta, t.parameters() - before)
    for iteration in range(1, 6):  # a server with one worker
        t.apply(before + delta)
        before = t.parameters()
        delta = t.compute(iteration).vector.copy()
    model, _ = plain(linear, SGD, range(6))
    assert_alike(t.model, model, rtol=2e-5, atol=2e-6)


# -- batches without samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["gradients", "parameters", "changes", "deltas"])
def test_an_empty_batch_adds_nothing_and_touches_nothing(exchange):
    t = trainer(everything, exchange=exchange, batches=[BATCHES[0], np.arange(0)])
    t.compute(0)
    before = digest(t.state()[0])
    step = t.compute(1)
    assert (step.samples, step.loss) == (0, 0.0)
    assert not step.vector.any()
    assert digest(t.state()[0]) == before


# -- evaluation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 256, 300])
def test_evaluation_sums_over_all_batches(size):
    inputs = np.random.default_rng(1).normal(size=(size, 1, 4, 4)).astype(np.float32)
    test = Samples(inputs, np.random.default_rng(2).integers(0, CLASSES, size))
    t = trainer(everything, test=test)
    iterate(t, range(2))
    t.model.eval()
    with torch.no_grad():
        output = t.model(torch.tensor(inputs))
        expected = float(nn.functional.cross_entropy(output, torch.tensor(test.targets), reduction="sum"))
    got = t.evaluate()
    assert got.sums["loss"] == (pytest.approx(expected, rel=1e-4), size)
    assert got.sums["accuracy"] == (int((output.argmax(1).numpy() == test.targets).sum()), size)
    assert got.samples == size


def test_evaluating_changes_no_weights_and_the_next_step_trains_again():
    t, other = trainer(everything, test=DATA), trainer(everything, test=DATA)
    for iteration in range(3):
        iterate(t, [iteration])
        t.evaluate()
        iterate(other, [iteration])
    assert digest(t.weights()[0]) == digest(other.weights()[0])


def test_no_test_set():
    assert trainer(test=NOTHING).evaluate() == EvaluationSums()


def test_a_regression_has_a_loss_and_no_accuracy():
    targets = RNG.normal(size=(40, CLASSES)).astype(np.float32)
    t = TorchTrainer(
        program(seeded(linear), loss="mse_loss"),
        feed=ArrayBatchSource(Samples(DATA.inputs, targets), Samples(DATA.inputs, targets)),
        sampler=Batches(),
        exchange="gradients",
        seed=0,
    )
    first = t.evaluate()
    iterate(t, range(8))
    last = t.evaluate()
    assert last.sums["loss"][0] < first.sums["loss"][0]
    assert last.sums["accuracy"] is None
