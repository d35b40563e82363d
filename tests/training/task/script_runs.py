"""Runs of scripts with a training loop of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_runs import WORLD, real

from ephemeron.training.driver import prepare, renewal, script_trial
from ephemeron.training.driver.programs import job_of
from ephemeron.training.job import parse_fault

SCRIPT = Path(__file__).parent / "scripts/points.py"
EXACT = ("--double", "--no-dropout")
"""Arguments with which numbers do not depend on the number of workers beyond rounding."""
_TRIALS: dict[object, object] = {}


WARM = """
import json, os, runpy, sys
from ephemeron.training.driver import script_process  # and PyTorch with it

for line in sys.stdin:
    arguments, folder, output = json.loads(line)
    if arguments[0] != "-m":
        import torch._dynamo  # as the first step of an optimiser does in a script alone
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    code = 1
    try:
        os.chdir(folder)
        written = os.open(output, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(written, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            script_process._main()
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""
"""Forks a process for each program, with the imports done that take most of a short script's time."""
LIMIT_S = 300.0


class WarmProcesses:
    """Programs in processes of their own that have imported PyTorch; `test_script_trials` has a trial that has not."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._server = subprocess.Popen(
            [sys.executable, "-c", WARM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip

    def run(self, command: list[str], *, cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` runs the command of a Python program."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        arguments, self._count = [each for each in command[1:] if each != "-P"], self._count + 1
        output = self._folder / f"output-{self._count}"
        print(json.dumps([arguments, str(cwd), str(output)]), file=self._server.stdin, flush=True)
        assert select.select([self._server.stdout], [], [], LIMIT_S)[0], f"not within {LIMIT_S:g} s: {arguments}"
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess(command, code, "", output.read_text(errors="replace"))

    def close(self) -> None:
        self._server.communicate(timeout=LIMIT_S)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcesses]:
    processes = WarmProcesses(tmp_path_factory.mktemp("warm"))
    yield processes
    processes.close()


@pytest.fixture(autouse=True)
def trials_once(monkeypatch, home, request):
    """The trial of a script is the same for every fault."""

    def known(job, code, configuration):
        key = (job.script, code, configuration.workers, job.options.decides)
        if key not in _TRIALS:
            with monkeypatch.context() as patch:
                patch.setattr(script_trial.subprocess, "run", request.getfixturevalue("warm").run)
                _TRIALS[key] = script_trial.script_trial(job, code, configuration)
        return _TRIALS[key]

    for module in (prepare, renewal):
        monkeypatch.setattr(module, "script_trial", known)


def job(*arguments, script=SCRIPT, **options):
    made = job_of(script, {"arguments": tuple(arguments), **options})
    return dataclasses.replace(made, simulation=WORLD)


def run(workers, *arguments, script=SCRIPT, faults=(), options=None, **more):
    made = job(*arguments, script=script, **(options or {}))
    return real(
        made, workers=workers, aggregators=min(2, workers), checkpoint_every=2, faults=list(map(parse_fault, faults)), **more
    )  # fmt: skip


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
