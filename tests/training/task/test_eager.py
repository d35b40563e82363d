"""Optimisers do not import the compiler, which stays importable."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

PROGRAM = """
import importlib
import sys
import numpy as np
import torch
from torch import nn
from ephemeron.data import Samples
from ephemeron.data.batch_source import ArrayBatchSource
from ephemeron.training.job import Target
from ephemeron.training.task.losses import make_loss
from ephemeron.training.job import TrainingOptions
from ephemeron.training.task.program import JobTask
from ephemeron.training.task.program import with_optimizers
from ephemeron.training.worker.trainers.torch_trainer import TorchTrainer

class All:
    def batch(self, iteration):
        return np.arange(8)

def end_of(name, *, real=False):
    torch.manual_seed(0)
    if real:
        importlib.import_module("torch._dynamo")
    model = nn.Linear(4, 3)
    samples = Samples(np.ones((8, 4), dtype=np.float32), np.arange(8) % 3)
    trainer = TorchTrainer(
        with_optimizers(
            JobTask(lambda: model, make_loss(Target(target="cross_entropy"), None), Target(target=name)), model,
            TrainingOptions(), find=None, epoch_length=0, epochs=1,
        ),
        feed=ArrayBatchSource(samples, samples), sampler=All(), exchange="gradients", seed=0,
    )
    for iteration in range(3):
        step = trainer.compute(iteration)
        trainer.apply(step.vector / step.samples)
        trainer.evaluate()
        trainer.load(*trainer.state())
    return model.weight.detach().numpy().tobytes()

names = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"]
without = [end_of(name) for name in names]
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
assert sys.modules["torch._dynamo"].__file__
assert [end_of(name, real=True) for name in names] == without
"""


@pytest.mark.slow
def test_optimizers_import_no_compiler_and_compute_the_same():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
