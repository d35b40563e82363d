"""Runs of scripts with a training loop of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from training_runs import WORLD, real

from ephemeron.training.driver import renewal
from ephemeron.training.driver.launching import prepare, script_trial
from ephemeron.training.driver.launching.programs import job_of
from ephemeron.training.job import parse_fault
from warm_processes import warm

SCRIPT = Path(__file__).parent / "scripts/points.py"
EXACT = ("--double", "--no-dropout")
"""Arguments with which numbers do not depend on the number of workers beyond rounding."""
_TRIALS: dict[object, object] = {}


@pytest.fixture(autouse=True)
def trials_once(monkeypatch, home):
    """The trial of a script is the same for every fault; its process begins warm, but for one in `test_script_trials`."""

    def known(job, code, configuration, on_progress=None):
        key = (job.script, code, configuration.workers, job.options.decides)
        if key not in _TRIALS:
            with warm():
                _TRIALS[key] = script_trial.script_trial(job, code, configuration)
        return _TRIALS[key]

    for module in (prepare, renewal):
        monkeypatch.setattr(module, "script_trial", known)


def job(*arguments, script=SCRIPT, **options):
    made = job_of(script, {"arguments": tuple(arguments), **options})
    return dataclasses.replace(made, simulation=WORLD)


def run(workers, *arguments, script=SCRIPT, faults=(), options=None, **more):
    made = job(*arguments, script=script, **(options or {}))
    return real(made, workers=workers, aggregators=min(2, workers), checkpoint_every=2, faults=list(map(parse_fault, faults)), **more)


def script(tmp_path, body, *, before="", register="model=model, optimizer=optimizer"):
    """A script of few lines in a folder of its own."""
    folder = tmp_path / "code"
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(f"""\
import copy
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
import ephemeron

torch.manual_seed(1)
inputs, targets = torch.randn(26, 4), torch.randn(26, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run = ephemeron.current()
{before}
run.register({register})
{body}
""")
    return folder / "mine.py"


LOOP = """
for x, y in run.steps(loader, epochs=2):
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    run.step(optimizer, loss)
"""
