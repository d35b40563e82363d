"""The trainer compared with plain PyTorch, and a successor with its predecessor."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch import nn  # noqa: E402

from ephemeron.data import Samples  # noqa: E402
from ephemeron.data.batch_source import ArrayBatchSource  # noqa: E402
from ephemeron.errors import JobError  # noqa: E402
from ephemeron.training.job import Target, TrainingOptions  # noqa: E402
from ephemeron.training.metrics import EvaluationSums  # noqa: E402
from ephemeron.training.task.job_task import JobTask, optimizer_over  # noqa: E402
from ephemeron.training.task.losses import make_loss  # noqa: E402
from ephemeron.training.task.program import make_model, trainable, with_optimizers  # noqa: E402
from ephemeron.training.task.tensors import model_arrays  # noqa: E402
from ephemeron.training.tensors import decode_state, digest, encode_state  # noqa: E402
from ephemeron.training.worker.torch_trainer import TorchTrainer  # noqa: E402

CLASSES = 4
RNG = np.random.default_rng(0)
DATA = Samples(RNG.normal(size=(40, 1, 4, 4)).astype(np.float32), RNG.integers(0, CLASSES, 40))
BATCHES = [np.arange(i * 5, i * 5 + (3 if i == 4 else 5)) for i in range(8)]
NOTHING = Samples(DATA.inputs[:0], DATA.targets[:0])


class Batches:
    """A sampler of given batches."""

    def __init__(self, batches=BATCHES):
        self.batches = batches

    def batch(self, iteration):
        return self.batches[iteration]


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def everything():
    """Batch statistics, random numbers, and a buffer that is a single whole number."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, CLASSES)
    )


def half():
    return everything().to(torch.bfloat16)


class Mixed(nn.Module):
    """A float32 body with a head of another dtype."""

    def __init__(self, head=torch.float64):
        super().__init__()
        self.body = nn.Linear(16, 8)
        self.head = nn.Linear(8, CLASSES, dtype=head)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1))).to(self.head.weight.dtype)).to(torch.float64)


class Frozen(nn.Module):
    """Only the head is trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 8).requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x.flatten(1))))


SGD = Target(target="SGD", options={"lr": 0.1, "momentum": 0.9})
OPTIMIZERS = {
    "SGD": Target(target="SGD", options={"lr": 0.1}),
    "momentum": SGD,
    "nesterov": Target(target="SGD", options={"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "Adam": Target(target="Adam", options={"lr": 0.01, "betas": [0.8, 0.99]}),
    "amsgrad": Target(target="Adam", options={"lr": 0.01, "amsgrad": True}),
    "AdamW": Target(target="AdamW", options={"lr": 0.01, "weight_decay": 0.1}),
    "RMSprop": Target(target="RMSprop", options={"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": Target(target="Adagrad", options={"lr": 0.05}),
}


def seeded(build, seed=1):
    torch.manual_seed(seed)
    return build()


def program(model, optimizer=SGD, loss="cross_entropy", **options):
    task = JobTask(lambda: model, make_loss(Target(target=loss), no_code), optimizer)
    return with_optimizers(task, model, TrainingOptions(**options), find=no_code, epoch_length=4, epochs=2)


def trainer(build=linear, optimizer=SGD, *, exchange="gradients", seed=7, weights=1, test=NOTHING, batches=BATCHES):
    return TorchTrainer(
        program(seeded(build, weights), optimizer),
        feed=ArrayBatchSource(DATA, test),
        sampler=Batches(batches),
        exchange=exchange,
        seed=seed,
    )


def no_code(name):
    raise AssertionError(f"nothing of the user's own is needed, but {name} was asked for")


def iterate(t, iterations):
    """What a group of one does."""
    losses = []
    for iteration in iterations:
        step = t.compute(iteration)
        assert step.samples == len(t.sampler.batch(iteration))
        losses.append(step.loss)
        mean = step.vector / t.dtype.type(step.samples)
        t.apply(mean)
    return losses


def plain(build, optimizer, iterations):
    """The same in plain PyTorch."""
    model = seeded(build)
    wanted = [p for p in model.parameters() if p.requires_grad]
    steps = getattr(torch.optim, optimizer.target)(wanted, **optimizer.options)
    losses = []
    for iteration in iterations:
        part = DATA.take(BATCHES[iteration])
        steps.zero_grad()
        loss = nn.functional.cross_entropy(model(torch.tensor(part.inputs)), torch.tensor(part.targets))
        loss.backward()
        steps.step()
        losses.append(float(loss.detach()))
    return model, losses


def assert_alike(model, other, *, rtol, atol):
    for (name, a), (_, b) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


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


# -- random numbers ---------------------------------------------------------------------------------------


def states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_a_trainer_does_not_change_global_random_states():
    t = trainer(everything)
    before = states()
    iterate(t, range(3))
    t.evaluate()
    trainer_again = TorchTrainer(
        t.program, feed=ArrayBatchSource(DATA, DATA), sampler=Batches(), exchange="gradients", seed=3,
    )  # fmt: skip
    trainer_again.evaluate()
    assert states() == before


def test_two_trainers_that_take_turns_draw_what_each_would_have_drawn_alone():
    alone = [trainer(everything, seed=seed) for seed in (1, 2)]
    for t in alone:
        iterate(t, range(4))
    turns = [trainer(everything, seed=seed) for seed in (1, 2)]
    for iteration in range(4):
        for t in turns:
            iterate(t, [iteration])
    assert digest(turns[0].weights()[0]) == digest(alone[0].weights()[0])
    assert digest(turns[1].weights()[0]) == digest(alone[1].weights()[0])
    assert digest(alone[0].weights()[0]) != digest(alone[1].weights()[0]), "dropout has to differ between ranks"


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


# -- state ------------------------------------------------------------------------------------------------


def handed_over(t, **options):
    """A fresh trainer with other weights and other random numbers, that was given the state as it travels."""
    arrays, meta = t.state()
    fresh = trainer(**{"weights": 99, "seed": 99, **options})
    if fresh.initial_first:  # as at the start of a function: frozen parameters are not part of a state
        fresh.load(*model_arrays(seeded(options.get("build", linear))))
    fresh.load(*decode_state(encode_state(arrays, meta)))
    return fresh


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("build", [everything, half, Mixed, Frozen])
def test_a_successor_goes_on_to_the_last_bit(build, optimizer):
    straight = trainer(build, optimizer)
    expected = iterate(straight, range(7))
    first = trainer(build, optimizer)
    losses = iterate(first, range(4))
    second = handed_over(first, build=build, optimizer=optimizer)
    losses += iterate(second, range(4, 7))
    assert losses == expected
    assert digest(second.weights()[0]) == digest(straight.weights()[0])
    (arrays, meta), (wanted, notes) = (decode_state(encode_state(*t.state())) for t in (second, straight))
    assert digest(arrays) == digest(wanted)
    assert sorted(meta.pop("bf16")) == sorted(notes.pop("bf16"))
    assert meta == notes


@pytest.mark.parametrize("exchange", ["parameters", "changes", "deltas"])
def test_a_successor_goes_on_whatever_is_exchanged(exchange):
    straight = trainer(everything, exchange=exchange)
    first = trainer(everything, exchange=exchange)
    for iteration in range(3):
        for t in (straight, first):
            t.compute(iteration)
            t.apply(t.parameters())
    second = handed_over(first, build=everything, exchange=exchange)
    for t in (straight, second):
        t.compute(3)
    assert digest(second.state()[0]) == digest(straight.state()[0])


def test_a_state_is_a_copy():
    t = trainer(everything, OPTIMIZERS["Adam"])
    iterate(t, range(2))
    arrays, _ = t.state()
    before = digest(arrays)
    iterate(t, range(2, 4))
    assert digest(arrays) == before
    assert digest(t.state()[0]) != before


def test_buffers_and_numbers_without_shape_are_part_of_the_weights():
    t = trainer(everything)
    iterate(t, range(3))
    arrays, _ = t.weights()
    assert arrays["1.num_batches_tracked"].shape == ()
    assert arrays["1.num_batches_tracked"] == 3
    assert arrays["1.running_mean"].any()


def test_initial_weights_can_be_loaded_without_an_optimizer():
    source, t = trainer(half, weights=5), trainer(half, weights=1)
    arrays, notes = source.weights()
    t.load(*decode_state(encode_state(arrays, notes)))
    assert digest(t.weights()[0]) == digest(arrays)
    assert t.model[0].weight.dtype == torch.bfloat16


def test_bf16_travels_as_its_own_bits():
    t = trainer(half)
    arrays, notes = t.weights()
    assert set(notes["bf16"]) == {n for n, p in t.model.state_dict().items() if p.dtype == torch.bfloat16}
    assert arrays["0.weight"].dtype == np.uint16
    restored = torch.from_numpy(arrays["0.weight"]).view(torch.bfloat16)
    assert torch.equal(restored, t.model[0].weight.detach())


def test_parameters_are_a_copy():
    t = trainer()
    vector = t.parameters()
    vector[:] = 0
    assert t.parameters().any()


# -- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (Target(target="Sgd"), ["'Sgd' is not in torch.optim", "use one of", "SGD"]),
        (Target(target="lr_scheduler"), ["'lr_scheduler' is not in torch.optim"]),
        (Target(target="LBFGS"), ["'LBFGS'", "use a first-order optimiser"]),
        (Target(target="SGD", options={"momentun": 0.9}), ["SGD refuses its options", "momentun"]),
        (Target(target="SGD", options={"lr": -1.0}), ["SGD refuses its options", "-1.0"]),
        (Target(target="Adam", options={"lr": "fast"}), ["Adam refuses its options"]),
    ],
)
def test_optimizers_that_cannot_be(target, says):
    with pytest.raises(JobError) as caught:
        optimizer_over(target, list(linear().parameters()))
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize("build", [lambda: linear().requires_grad_(False), nn.ReLU], ids=["frozen", "none at all"])
def test_a_model_without_anything_to_train(build):
    with pytest.raises(JobError, match="the model has no trainable parameter"):
        trainable(build())
    with pytest.raises(JobError, match="the model has no trainable parameter"):
        program(build())


def test_losses():
    output, wanted = torch.zeros(2, 3), torch.tensor([0, 2])
    smooth = make_loss(Target(target="cross_entropy", options={"label_smoothing": 0.5}), no_code)
    assert torch.equal(smooth(output, wanted), nn.functional.cross_entropy(output, wanted, label_smoothing=0.5))
    own = make_loss(Target(target="mine:loss", options={"factor": 3}), {"mine:loss": lambda o, w, factor: factor}.get)
    assert own(output, wanted) == 3
    with pytest.raises(JobError, match=r"loss 'crossentropy' is not in torch.nn.functional; name one, or module:"):
        make_loss(Target(target="crossentropy"), no_code)


def build_with(function, *, seed=0, dtype="float32", **options):
    return make_model(Target(target="m:f", options=options), {"m:f": function}.get, seed=seed, dtype=dtype)


def test_a_model_is_the_same_on_all_ranks_and_follows_the_seed():
    torch.manual_seed(1)
    first = build_with(linear, seed=5)
    torch.manual_seed(2)
    outside = torch.get_rng_state()
    again, other = build_with(linear, seed=5), build_with(linear, seed=6)
    assert torch.equal(torch.get_rng_state(), outside)
    assert torch.equal(first[1].weight, again[1].weight)
    assert not torch.equal(first[1].weight, other[1].weight)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 + 5, -(2**70)])
def test_any_integer_is_a_seed(seed):
    assert torch.equal(build_with(linear, seed=seed)[1].weight, build_with(linear, seed=seed)[1].weight)


def test_a_model_takes_its_options_and_the_jobs_dtype():
    model = build_with(lambda width: nn.Linear(width, 1), width=3, dtype="float64")
    assert model.weight.shape == (1, 3)
    assert model.weight.dtype == torch.float64


def test_a_model_that_is_none():
    with pytest.raises(JobError, match=r"model m:f returned dict; return a torch.nn.Module"):
        build_with(dict)
    with pytest.raises(JobError, match=r"model m:f raised TypeError: .*width"):
        build_with(linear, width=3)

    def broken():
        raise RuntimeError("no such file")

    outside = torch.get_rng_state()
    with pytest.raises(JobError, match="model m:f raised RuntimeError: no such file"):
        build_with(broken)
    assert torch.equal(torch.get_rng_state(), outside)
