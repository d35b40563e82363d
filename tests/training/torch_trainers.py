"""Models, batches and trainers of the tests of `TorchTrainer`, and the same in plain PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from torch import nn  # noqa: E402

from ephemeron.data import Samples  # noqa: E402
from ephemeron.data.batch_source import ArrayBatchSource  # noqa: E402
from ephemeron.training.job import Target, TrainingOptions  # noqa: E402
from ephemeron.training.task.losses import make_loss  # noqa: E402
from ephemeron.training.task.program import JobTask, with_optimizers  # noqa: E402
from ephemeron.training.task.tensors import model_arrays  # noqa: E402
from ephemeron.training.tensors import decode_state, encode_state  # noqa: E402
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer  # noqa: E402

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
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, CLASSES))


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
        mean = step.vector / t.dtype.type(step.weight)
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


def handed_over(t, **options):
    """A fresh trainer with other weights and other random numbers, that was given the state as it travels."""
    arrays, meta = t.state()
    fresh = trainer(**{"weights": 99, "seed": 99, **options})
    if fresh.initial_first:  # as at the start of a function: frozen parameters are not part of a state
        fresh.load(*model_arrays(seeded(options.get("build", linear))))
    fresh.load(*decode_state(encode_state(arrays, meta)))
    return fresh
