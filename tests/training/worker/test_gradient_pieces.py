"""Pieces that are sent during the backward pass have the bits of those that are sent after it, for every kind of model."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_trainers import BATCHES, CLASSES, DATA, NOTHING, Batches, Frozen, Mixed, everything, linear, program, seeded  # noqa: E402

from ephemeron.data.batch_source import ArrayBatchSource  # noqa: E402
from ephemeron.errors import JobError  # noqa: E402
from ephemeron.functions.passed_on import daemon_environment  # noqa: E402
from ephemeron.training.worker.non_finite import gaps  # noqa: E402
from ephemeron.training.worker.trainers.early_pieces import OVERLAP_VARIABLE  # noqa: E402
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer  # noqa: E402


class Shared(nn.Module):
    """A layer that is used three times."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.first(x.flatten(1))
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return self.last(x)


class Backwards(nn.Module):
    """Layers that are used in the opposite order of their definition."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(8, CLASSES), nn.Linear(16, 8)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))


class Unused(nn.Module):
    """A layer that takes no part."""

    def __init__(self):
        super().__init__()
        self.first, self.idle, self.last = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.flatten(1))))


class Sometimes(Unused):
    """A layer that takes part in every second forward pass."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        x = torch.tanh(self.first(x.flatten(1)))
        return self.last(self.idle(x) if self.calls % 2 else x)


class Reentrant(Shared):
    """A layer whose gradient is accumulated several times within one backward pass."""

    def forward(self, x):
        x = self.first(x.flatten(1))
        for _ in range(3):
            x = checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=True)
        return self.last(x)


class Scaled(Backwards):
    """A program whose own hook changes a gradient after it was accumulated."""

    def __init__(self):
        super().__init__()
        self.first.weight.register_hook(self._halve)

    def _halve(self, _):
        if self.last.weight.grad is not None:
            self.last.weight.grad.mul_(0.5)


class ByHand(Unused):
    """A gradient that is written in the forward pass."""

    def forward(self, x):
        if self.idle.weight.grad is not None:
            self.idle.weight.grad.fill_(0.25)
        return super().forward(x)


class Sparse(nn.Module):
    """An embedding with a sparse gradient, and one without."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(9, 8, sparse=True), nn.Embedding(9, 8)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x):
        which = (x.flatten(1)[:, :1].abs() * 4).long().clamp(max=8)
        return self.last(torch.cat([self.a(which), self.b(which)], 2).flatten(1))


class Empty(Backwards):
    """A parameter without elements."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))


MODELS = {
    "plain": linear,
    "batch statistics and dropout": everything,
    "one layer": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES)),
    "used three times": Shared,
    "defined backwards": Backwards,
    "no part": Unused,
    "sometimes": Sometimes,
    "reentrant": Reentrant,
    "own hook": Scaled,
    "by hand": ByHand,
    "sparse": Sparse,
    "no elements": Empty,
    "mixed dtypes": Mixed,
    "half": lambda: linear().to(torch.bfloat16),
    "frozen": Frozen,
}


class Recorded:
    """Receiver of pieces that copies them."""

    def __init__(self, ranges):
        self.ranges, self.taken = ranges, {}

    def take(self, number, part, weight):
        assert number not in self.taken
        self.taken[number] = part.copy(), weight
        return True


def new(build, **options):
    return TorchTrainer(
        program(seeded(build), **options), feed=ArrayBatchSource(DATA, NOTHING), sampler=Batches(BATCHES), exchange="gradients", seed=7
    )


def cut(size, length):
    return [(start, min(start + length, size)) for start in range(0, size, length)]


def compare(build, length, iterations=4, **options):
    """Trains two alike, of which one gives pieces; returns numbers of the pieces that were given, by iteration."""
    whole, early = new(build, **options), new(build, **options)
    found = []
    for iteration in range(iterations):
        to = Recorded(cut(early.size, length))
        early.give_early(to)
        ours, theirs = early.compute(iteration), whole.compute(iteration)
        assert ours.vector.tobytes() == theirs.vector.tobytes()
        assert ours._replace(vector=None) == theirs._replace(vector=None)
        for number, (part, weight) in to.taken.items():
            start, stop = to.ranges[number]
            assert part.tobytes() == theirs.vector[start:stop].tobytes()
            assert weight == theirs.weight
        found.append(set(to.taken))
        mean = theirs.vector / theirs.vector.dtype.type(theirs.weight)
        whole.apply(mean)
        early.apply(mean.copy())
    assert early.parameters().tobytes() == whole.parameters().tobytes()
    return found


@pytest.mark.parametrize("length", [1, 13, 10_000])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_the_whole(name, accumulate, length):
    found = compare(MODELS[name], length, accumulate=accumulate, clip_norm=0.1)
    assert found[0] == set()  # it only watches
    if name in ("plain", "used three times", "defined backwards", "frozen"):
        assert all(given == found[1] for given in found[1:])
        assert found[1] == set(range(len(cut(new(MODELS[name]).size, length))))
    if name in ("reentrant", "own hook") and length < 40:
        assert not any(found)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.integers(1, 60),
    st.integers(1, 5),
    st.permutations(range(5)),
)
def test_any_chain_of_layers(widths, biases, length, accumulate, order):
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            ins, outs = [16, *widths], [*widths, CLASSES]
            layers = {i: nn.Linear(a, b, bias=biases[i]) for i, (a, b) in enumerate(zip(ins, outs, strict=True))}
            for i in sorted(layers, key=lambda i: order[i] if i < 5 else i):  # defined in another order than used
                self.add_module(f"layer{i}", layers[i])
            self.chain = [layers[i] for i in sorted(layers)]

        def forward(self, x):
            x = x.flatten(1)
            for layer in self.chain[:-1]:
                x = torch.tanh(layer(x))
            return self.chain[-1](x)

    found = compare(Chain, length, iterations=3, accumulate=accumulate)
    assert found[1] == found[2] == set(range(len(cut(new(Chain).size, length))))


def test_absent_gradients_wait_for_the_end():
    found = compare(Unused, 8)
    size, idle = new(Unused).size, range(136, 208)
    assert found[1] == {n for n, (a, b) in enumerate(cut(size, 8)) if not set(range(a, b)) & set(idle)}


def test_a_gradient_that_comes_again_after_its_piece_was_sent_ends_the_run():
    class Later(Reentrant):
        def forward(self, x):
            return super().forward(x) if self.reenters else Shared.forward(self, x)

        reenters = False

    trainer = new(Later)
    trainer.give_early(Recorded(cut(trainer.size, 8)))
    for iteration in range(2):
        trainer.compute(iteration)
        trainer.give_early(Recorded(cut(trainer.size, 8)))
    trainer.model.reenters = True
    with pytest.raises(JobError, match="EPHEMERON_DIRECT_OVERLAP=0"):
        trainer.compute(2)


def test_a_refused_piece_is_the_last():
    class Refusing(Recorded):
        def take(self, number, part, weight):
            super().take(number, part, weight)
            return len(self.taken) < 3

    trainer, to = new(linear), Refusing(cut(new(linear).size, 8))
    trainer.give_early(to)
    for iteration in range(2):
        trainer.compute(iteration)
    assert len(to.taken) == 3


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_nothing_is_given_once_the_loss_is_not_finite(loss):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.broken = linear(), False

        def forward(self, x):
            y = self.inner(x)
            return y + loss if self.broken else y

    trainer = new(Broken)
    for iteration in range(3):
        to = Recorded(cut(trainer.size, 8))
        trainer.give_early(to)
        trainer.model.broken = iteration == 2
        trainer.compute(iteration)
    assert to.taken == {}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6), st.integers(0, 30))
def test_gaps(pairs, size):
    ranges = [(min(p), min(max(p), size)) for p in pairs if min(p) < min(max(p), size)]
    covered = {i for a, b in ranges for i in range(a, b)}
    assert [i for a, b in gaps(ranges, size) for i in range(a, b)] == sorted(set(range(size)) - covered)


def test_a_weight_of_the_program_is_that_of_early_pieces():
    trainer, whole = new(linear), new(linear)
    for each in (trainer, whole):
        step = each.program.task.training_step
        each.program.task.training_step = lambda model, batch, step=step, **more: {**step(model, batch), "weight": 2.5}
    for iteration in range(2):
        to = Recorded(cut(trainer.size, 8))
        trainer.give_early(to)
        ours, theirs = trainer.compute(iteration), whole.compute(iteration)
        assert ours.vector.tobytes() == theirs.vector.tobytes()
    assert {weight for _, weight in to.taken.values()} == {2.5}
    assert np.concatenate([to.taken[n][0] for n in sorted(to.taken)]).tobytes() == theirs.vector.tobytes()


def test_local_functions_see_the_variable(monkeypatch):
    monkeypatch.setenv(OVERLAP_VARIABLE, "0")
    assert daemon_environment({})[OVERLAP_VARIABLE] == "0"
