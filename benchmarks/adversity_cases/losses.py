"""Losses that are no means over samples, parts without labels, and what a program holds beside its model when a function is killed."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import ephemeron
from benchmarks.adversity_cases import case
from ephemeron.errors import JobError
from ephemeron.training.job import Target, parse_fault
from ephemeron.training.task.losses import Loss, make_loss

MEANS = "means over labels merged by samples"
NOTHING = "parts without labels"
STATE = "state that a replacement does not have"
FILES = "files that a function writes"
SAMPLES, STEPS = 24, 3

PROGRAMS = """
import random
import numpy as np, torch, ephemeron
from torch import nn
from torch.nn import functional

def build(end=False):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), *([nn.Sigmoid()] if end else []))

class Labels(ephemeron.Task):
    def __init__(self, how):
        self.how = how
        self.rng, self.old = np.random.default_rng(0), np.random.RandomState(1)
        self.python, self.torch = random.Random(2), torch.Generator().manual_seed(3)
    def model(self): return build()
    def optimizers(self, model): return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    def training_step(self, model, batch):
        x, y = batch
        scores, known = model(x), y != -100
        loss = functional.cross_entropy(scores, y, reduction="sum" if self.how == "summed" else "mean")
        if self.how == "given": return {"loss": loss, "weight": int(known.sum())}
        if self.how == "masked":
            terms = functional.cross_entropy(scores, y, reduction="none")
            return {"loss": (terms * known).sum() / known.sum(), "weight": known.sum()}
        if self.how == "numpy": return loss * (1 + self.rng.random())
        if self.how == "legacy numpy": return loss * (1 + self.old.rand())
        if self.how == "random": return loss * (1 + self.python.random())
        if self.how == "torch": return loss * (1 + float(torch.rand((), generator=self.torch)))
        return loss
    def on_step_end(self, model):
        if self.how == "writes":
            with open(self.output_dir / "steps.txt", "a") as log: print(self.global_step, file=log)
        if self.how == "writes too much": (self.output_dir / "large").write_bytes(bytes(65 << 20))
"""


@cache
def folder() -> Path:
    """Folder of the programs, which can be imported."""
    made = Path(tempfile.mkdtemp())
    (made / "adversity_programs.py").write_text(PROGRAMS)
    sys.path.insert(0, str(made))
    return made


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, class numbers, and three numbers for each sample."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((SAMPLES, 6)), rng.integers(0, 3, SAMPLES), rng.standard_normal((SAMPLES, 3))


X, CLASSES, REAL = arrays()


def ignoring(count: int) -> np.ndarray:
    """Labels of which the first are ignored."""
    return np.where(np.arange(SAMPLES) < count, -100, CLASSES)


def trained(program: str, y: np.ndarray, *, workers: int, accumulate: int = 1, **more: Any) -> ephemeron.Result:
    """Simulated functions on full batches; the test data are the training data."""
    np.savez(folder() / "d.npz", x=X, y=y)
    (folder() / "job.toml").write_text(
        f'name = "j"\n{program}\nepochs = {STEPS}\ndtype = "float64"\naccumulate = {accumulate}\n[data]\nsource = "npz"\n'
        f'path = "d.npz"\nsampling = "global"\noptions = {{ test_inputs = "x", test_targets = "y" }}\n'
    )
    return ephemeron.train(
        str(folder() / "job.toml"),
        platform="simulated",
        workers=workers,
        batch_size=SAMPLES // workers,
        on_event=lambda event: None,
        **more,
    )


def alone(y: np.ndarray, loss: str = "cross_entropy", **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Weights after the same steps in PyTorch, and the loss after them."""
    folder()
    import adversity_programs  # type: ignore[import-not-found]

    torch.manual_seed(0)
    net = adversity_programs.build(loss == "binary_cross_entropy").double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    bound = {n: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for n, v in options.items()}
    x, targets = torch.from_numpy(X), torch.from_numpy(y)
    for _ in range(STEPS):
        optimizer.zero_grad()
        getattr(functional, loss)(net(x), targets, **bound).backward()
        optimizer.step()
    told = getattr(functional, loss)(net(x), targets, **bound).item()
    return net.state_dict(), told / SAMPLES if options.get("reduction") == "sum" else told


def assert_equal(result: ephemeron.Result, expected: tuple[dict[str, torch.Tensor], float]) -> None:
    """The weights to 1e-12, and the loss that is told."""
    weights, told = expected
    for name, value in weights.items():
        np.testing.assert_allclose(result.state_dict()[name].numpy(), value.numpy(), rtol=0, atol=1e-12)
    found = result.summary.metrics["loss"]
    if np.isnan(told):
        assert found is None, found
    else:
        assert found is not None
        np.testing.assert_allclose(found, told, rtol=1e-12)


LOSSES: dict[str, tuple[str, dict[str, Any], np.ndarray]] = {
    "ignored labels": ("cross_entropy", {}, ignoring(11)),
    "another ignored class": ("cross_entropy", {"ignore_index": 2}, CLASSES),
    "class weights as a list": ("cross_entropy", {"weight": [0.1, 1.0, 10.0]}, ignoring(5)),
    "smoothed labels": ("cross_entropy", {"label_smoothing": 0.2}, ignoring(5)),
    "probabilities of classes": ("cross_entropy", {}, np.abs(REAL)),
    "sum of labels": ("cross_entropy", {"reduction": "sum"}, ignoring(11)),
    "log likelihoods": ("nll_loss", {"weight": [0.1, 1.0, 10.0]}, ignoring(5)),
    "sum of squares": ("mse_loss", {"reduction": "sum"}, REAL),
    "divergence of samples": ("kl_div", {"reduction": "batchmean"}, np.abs(REAL)),
    "weights of elements": ("binary_cross_entropy", {"weight": [0.1, 1.0, 10.0]}, (REAL > 0) * 1.0),
    "weights of positive elements": ("binary_cross_entropy_with_logits", {"pos_weight": [0.1, 1.0, 10.0]}, (REAL > 0) * 1.0),
    "margins with class weights": ("multi_margin_loss", {"weight": [0.1, 1.0, 10.0]}, CLASSES),
}


def _of_job(name: str, workers: int, accumulate: int) -> None:
    loss, options, y = LOSSES[name]
    given = ", ".join(f"{n} = {v!r}" for n, v in options.items()).replace("'", '"')
    end = ", options = { end = true }" if loss == "binary_cross_entropy" else ""
    program = (
        f'model = {{ target = "adversity_programs:build"{end} }}\nloss = {{ target = "{loss}", options = {{ {given} }} }}\n'
        'optimizer = { target = "SGD", options = { lr = 0.05, momentum = 0.9, weight_decay = 0.1 } }'
    )
    assert_equal(trained(program, y, workers=workers, accumulate=accumulate), alone(y, loss, **options))


for _name in LOSSES:
    case(MEANS, f"{_name}, 2 functions and 3 parts")(partial(_of_job, _name, 2, 3))


def _of_task(how: str, ignored: int, workers: int, accumulate: int) -> None:
    options = {"reduction": "sum"} if how == "summed" else {}
    program = f'task = {{ target = "adversity_programs:Labels", options = {{ how = "{how}" }} }}'
    y = ignoring(ignored)
    assert_equal(trained(program, y, workers=workers, accumulate=accumulate), alone(y, **options))


for _how in ("plain", "given", "masked", "summed"):
    for _workers, _parts in ((1, 4), (2, 1), (4, 2)):
        case(NOTHING, f"one label, {_how} by a task, {_workers} functions, {_parts} parts")(
            partial(_of_task, _how, SAMPLES - 1, _workers, _parts)
        )
for _how in ("plain", "given", "masked"):
    case(NOTHING, f"no label at all, {_how} by a task")(partial(_of_task, _how, SAMPLES, 2, 2))


def _refused(run: Callable[[], object], words: str) -> None:
    found = ""
    try:
        run()
    except JobError as error:
        found = str(error)
    assert words in found, found or "it was taken"


def _loss(target: str, **options: Any) -> Loss:
    return make_loss(Target(target=target, options=options), str)


for _target, _options, _words in (
    ("cross_entropy", {"reduction": "none"}, "gives no single number"),
    ("mse_loss", {"reduction": "sums"}, "gives no single number"),
    ("mse_loss", {"size_average": False}, "give reduction instead"),
    ("triplet_margin_loss", {}, "no loss of an output and targets"),
    ("relu", {}, "no loss of an output and targets"),
):
    case(MEANS, f"refused: {_target} {_options}")(partial(_refused, partial(_loss, _target, **_options), _words))


@case(MEANS, "refused: targets that are broadcast across samples")
def broadcast() -> None:
    _refused(lambda: _loss("mse_loss")(torch.zeros(4, 1), torch.zeros(4)), "do not correspond")


def _killed(how: str) -> None:
    program = f'task = {{ target = "adversity_programs:Labels", options = {{ how = "{how}" }} }}'
    more: dict[str, Any] = {"workers": 2, "checkpoint_every": 2}
    faults = [parse_fault("kill:rank=0,iteration=1,phase=compute"), parse_fault("kill:rank=1,iteration=2,phase=compute")]
    undisturbed, killed = trained(program, CLASSES, **more), trained(program, CLASSES, faults=faults, **more)
    assert killed.summary.invocations > undisturbed.summary.invocations
    assert killed.summary.weights_sha256 == undisturbed.summary.weights_sha256
    if how == "writes":
        texts = [(each.output_dir / "steps.txt").read_text().split() for each in (undisturbed, killed)]
        assert texts == [["1", "2", "3"]] * 2, texts


for _how in ("numpy", "legacy numpy", "random", "torch"):
    case(STATE, f"a task's own generator ({_how}) and two kills")(partial(_killed, _how))
case(FILES, "a log below output_dir and two kills")(partial(_killed, "writes"))


@case(FILES, "more than is collected")
def too_much() -> None:
    program = 'task = { target = "adversity_programs:Labels", options = { how = "writes too much" } }'
    _refused(lambda: trained(program, CLASSES, workers=1), "below output_dir")
