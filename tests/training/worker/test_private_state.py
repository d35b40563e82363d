"""A rank's state is another rank's state and what only the rank itself has, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from ephemeron.data import Samples, SampleSplit  # noqa: E402
from ephemeron.data.batch_source import ArrayBatchSource  # noqa: E402
from ephemeron.training.job import SchedulerSpec, Target, TrainingOptions  # noqa: E402
from ephemeron.training.task.losses import make_loss  # noqa: E402
from ephemeron.training.task.program import JobTask, with_optimizers  # noqa: E402
from ephemeron.training.task.script_batches import Share  # noqa: E402
from ephemeron.training.tensors import decode_state, digest, encode_state  # noqa: E402
from ephemeron.training.worker.trainers.script_trainer import ScriptTrainer  # noqa: E402
from ephemeron.training.worker.trainers.synthetic_trainer import CountingTrainer, SyntheticTrainer  # noqa: E402
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer  # noqa: E402
from ephemeron.training.worker.trainers.warm_up import rehearse  # noqa: E402

ITERATIONS = 8
RNG = np.random.default_rng(0)
DATA = Samples(RNG.normal(size=(64, 1, 4, 4)).astype(np.float32), RNG.integers(0, 4, 64))


class Places:
    """A sampler: each rank has four samples of an iteration."""

    def __init__(self, rank):
        self.rank = rank

    def batch(self, iteration):
        return np.arange(4) + 8 * iteration + 4 * self.rank


class DrawsWhenItSteps(JobTask):
    """A task that draws a random number after each update."""

    def on_step_end(self, model):
        torch.rand(3)


class Counts(JobTask):
    """A task with a state that depends on the rank's own samples."""

    seen = 0.0

    def training_step(self, model, batch):
        self.seen += float(batch[0].sum())
        return super().training_step(model, batch)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))


def everything():
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 4))


def half():
    return everything().to(torch.bfloat16)


def torch_trainer(rank, *, build=everything, optimizer="SGD", exchange="gradients", task=JobTask, local_steps=1, outer=None, **options):
    torch.manual_seed(1)
    model = build()
    chosen = Target(target=optimizer, options={"lr": 0.05, **({"momentum": 0.9} if optimizer == "SGD" else {})})
    made = task(lambda: model, make_loss(Target(target="cross_entropy"), None), chosen)
    program = with_optimizers(made, model, TrainingOptions(**options), find=None, epoch_length=4, epochs=2)
    return TorchTrainer(
        program,
        feed=ArrayBatchSource(DATA, Samples(DATA.inputs[:0], DATA.targets[:0])),
        sampler=Places(rank),
        exchange=exchange,
        seed=100 + rank,
        local_steps=local_steps,
        outer=outer,
    )


def every(case):
    """Makers of trainers by name of the case."""
    per_step = SchedulerSpec(target="CosineAnnealingLR", interval="step")
    nesterov = Target(target="SGD", options={"lr": 0.7, "momentum": 0.9, "nesterov": True})
    return {
        "plain": {"build": plain},
        "dropout and batch statistics": {},
        "bfloat16": {"build": half},
        "Adam": {"optimizer": "Adam"},
        "scheduler of steps": {"scheduler": per_step},
        "scheduler of epochs": {"scheduler": SchedulerSpec(target="StepLR", options={"step_size": 1})},
        "moving average": {"ema_decay": 0.9},
        "accumulated": {"accumulate": 2},
        "state of the task": {"task": Counts},
        "updates that draw": {"task": DrawsWhenItSteps},
        "local steps": {"exchange": "parameters", "local_steps": 2, "optimizer": "Adam", "scheduler": per_step},
        "outer optimizer": {"exchange": "deltas", "local_steps": 2, "outer": nesterov, "optimizer": "Adam"},
    }[case]


CASES = [
    "plain",
    "dropout and batch statistics",
    "bfloat16",
    "Adam",
    "scheduler of steps",
    "scheduler of epochs",
    "moving average",
    "accumulated",
    "state of the task",
    "updates that draw",
    "local steps",
    "outer optimizer",
]


def sent(state):
    """What arrives of arrays and plain values."""
    return decode_state(encode_state(*state))


def seen(trainer):
    """A state as one comparable value."""
    arrays, meta = sent(trainer.state())
    return digest(arrays), {**meta, "bf16": sorted(meta.get("bf16", ()))}


def merged(steps):
    """The mean of the contributions of all ranks."""
    weight = sum(step.samples if step.weight is None else step.weight for step in steps)
    total = np.sum([s.vector for s in steps], axis=0, dtype=steps[0].vector.dtype)
    return total / steps[0].vector.dtype.type(weight or 1)


def together(ranks, iterations):
    for t in iterations:
        mean = merged(_computed(ranks, t))
        for rank in ranks:
            rank.apply(mean)


def _computed(ranks, t):
    steps = [rank.compute(t) for rank in ranks]
    return [step._replace(vector=step.vector.copy()) for step in steps]


def check_before_compute(make, iterations):
    """Both parts taken between two iterations."""
    ranks = [make(0), make(1)]
    together(ranks, range(iterations))
    fresh = make(1)
    shared, own = sent(ranks[0].state()), sent(ranks[1].private_state())
    fresh.load(*shared, shared=True)
    fresh.load_private(*own)
    assert seen(fresh) == seen(ranks[1])
    assert seen(fresh) != seen(ranks[0]) or not own[0]
    three = [*ranks, fresh]
    if iterations < ITERATIONS:
        steps = _computed(three, iterations)
        assert np.array_equal(steps[2].vector, steps[1].vector)
        for rank in three:
            rank.apply(merged(steps[:2]))
        assert seen(fresh) == seen(ranks[1])


def check_after_compute(make, iterations):
    """The rank's own part taken after it has computed its last iteration, the other's after it has computed one more."""
    ranks = [make(0), make(1)]
    together(ranks, range(iterations))
    steps = _computed(ranks, iterations)
    own = sent(ranks[1].private_state())
    for rank in ranks:
        rank.apply(merged(steps))
    expected = seen(ranks[1])
    ranks[0].compute(iterations + 1)
    assert ranks[0].shares_after_compute
    fresh = make(1)
    fresh.load(*sent(ranks[0].state()), shared=True)
    fresh.load_private(*own)
    assert seen(fresh) == expected


@settings(max_examples=6, deadline=None)
@given(iterations=st.integers(1, ITERATIONS))
@pytest.mark.parametrize("case", CASES)
def test_another_ranks_state_and_the_own_part_are_the_ranks_state(case, iterations):
    check_before_compute(lambda rank: torch_trainer(rank, **every(case)), iterations)


@settings(max_examples=6, deadline=None)
@given(iterations=st.integers(0, ITERATIONS - 2))
@pytest.mark.parametrize("case", CASES[:-3])
def test_the_part_after_compute_is_that_of_the_next_iteration(case, iterations):
    check_after_compute(lambda rank: torch_trainer(rank, **every(case)), iterations)


@pytest.mark.parametrize("case", CASES[-3:])
def test_a_trainer_says_that_its_parts_do_not_fit_after_compute(case):
    ranks = [torch_trainer(rank, **every(case)) for rank in range(2)]
    together(ranks, range(1))
    assert not ranks[0].shares_after_compute


@pytest.mark.parametrize("case", CASES)
def test_a_rehearsal_changes_nothing(case):
    """As a successor computes before it gets its predecessor's state, or none."""
    fresh, rehearsed, trained = (torch_trainer(0, **every(case)) for _ in range(3))
    rehearse(rehearsed, 2)
    assert seen(rehearsed) == seen(fresh)
    together([fresh], range(2))
    together([rehearsed], range(2))
    assert seen(rehearsed) == seen(fresh)
    together([trained], range(5))
    late = torch_trainer(0, **every(case))
    rehearse(late, 3)
    late.load(*sent(trained.state()))
    together([trained], range(5, ITERATIONS))
    together([late], range(5, ITERATIONS))
    assert seen(late) == seen(trained)


def test_a_rehearsal_that_fails_is_for_the_iteration_that_counts_to_tell():
    class Fails(JobTask):
        def training_step(self, model, batch):
            raise ValueError("no")

    trainer = torch_trainer(0, task=Fails)
    before = seen(trainer)
    rehearse(trainer, 0)
    assert seen(trainer) == before
    with pytest.raises(ValueError, match="no"):
        trainer.compute(0)


@pytest.mark.parametrize("local_steps", [0, 3])
def test_a_synthetic_trainer(local_steps):
    split = SampleSplit(1000, [12, 12], [500, 500])

    def make(rank):
        return SyntheticTrainer(seed=7 + rank, split=split, rank=rank, local_steps=local_steps)

    check_before_compute(make, 4)
    check_after_compute(make, 4)


def test_a_counting_trainer():
    def make(rank):
        return CountingTrainer(rank=rank, world=2, iterations=6, tables=2)

    check_after_compute(make, 3)


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import ephemeron

torch.manual_seed(1)
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
loader = DataLoader(data, batch_size=8)
model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
noise = torch.Generator().manual_seed(3)
run = ephemeron.current()
run.register(model=model, optimizer=optimizer, scheduler=scheduler, noise=noise)
for x, y in run.steps(loader, epochs=2):
    if run.rank:
        torch.rand(2, generator=noise)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    run.step(optimizer, loss)
    torch.rand(1 + run.rank)
    scheduler.step()
"""


@pytest.mark.parametrize("iterations", [0, 1, 3, 4, 7])
def test_a_script(tmp_path, iterations):
    (tmp_path / "mine.py").write_text(SCRIPT)
    made = []

    def make(rank):
        made.append(
            ScriptTrainer(
                tmp_path / "mine.py",
                [],
                [tmp_path],
                share=Share(rank=rank, weights=(1, 1)),
                epoch_length=4,
                iterations=8,
                seed=5,
                rank_seed=50 + rank,
            )
        )
        return made[-1]

    try:
        assert not make(0).shares_after_compute
        check_before_compute(make, iterations)
    finally:
        for trainer in made:
            trainer.close()
