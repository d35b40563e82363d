"""Studies on processes of this machine: what dies, dies really."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tuning_worlds import JOB, MakeStudy, trial_runs

from ephemeron.training.driver import train
from ephemeron.training.driver.result import result_of
from ephemeron.training.job import parse_job

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")
pytestmark = pytest.mark.slow

GATED = """
import os, time
from pathlib import Path
import torch
from torch import nn

class Gated(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.folder, self.passes = Path(folder), 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 12:
            (self.folder / f"reached-{os.getpid()}").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        return self.inner(x)

def build(folder):
    return Gated(folder)
"""
CLIENT = Path(sys.executable).with_name("ephemeron")
LIMIT_S = 240.0


def wait_for(what: Any) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("dies", ["its client and a function", "its client and their host", "no process: it is interrupted"])
def test_a_study_goes_on_after_the_death_of(dies: str, make_study: MakeStudy, home: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    code = tmp_path / "code"
    code.mkdir()
    (code / "gated.py").write_text(GATED)
    run = {"workers": 1, "batch_size": 240, "memory_mb": 512, "checkpoint_every": 5}
    job = {"model": {"target": "gated:build", "options": {"folder": str(gate)}}, "code": [str(code)], "run": {"platform": "local", **run}}
    study = make_study(sampler="grid", space={"seed": [0, 1]}, concurrency=2, job=job)
    file = study.folder.path.parent / "study.toml"
    command = [CLIENT, "tune", str(file), "--out", str(study.folder.path), "--json"]
    with subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.PIPE) as client:
        reached = wait_for(lambda: len(found := list(gate.glob("reached-*"))) == 2 and found)
        before = {t.number: t.run for t in wait_for(lambda: len(study.trials) == 2 and study.trials)}
        if dies.startswith("its client"):
            client.kill()
        else:  # functions that do not stop at a checkpoint are ended, and have earlier ones
            client.send_signal(signal.SIGINT)
            assert client.wait() == 3
            assert client.stdout is not None
            assert json.loads(client.stdout.read())["state"] == study.status.state == "stopped"
    if dies == "its client and a function":
        os.kill(int(reached[0].name.partition("-")[2]), signal.SIGKILL)
    elif dies == "its client and their host":
        (host,) = [json.loads(p.read_text())["pid"] for p in (home / "sessions").glob("*/host.json")]
        for process in [*psutil.Process(host).children(recursive=True), psutil.Process(host)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    (gate / "go").touch()
    result = study.run(resume=True)
    assert {t.number: t.run for t in result.status.trials} == before
    assert result.count("finished") == 2
    assert sorted(r.run_id for r in trial_runs()) == sorted(before.values())
    summaries = [result_of(r).summary for r in trial_runs()]
    assert result.status.spent_usd == pytest.approx(sum(s.cost_usd for s in summaries))
    assert sum(s.invocations for s in summaries) == (3 if dies == "its client and a function" else 4)
    document = {**JOB, **job, "run": {"platform": "simulated", **run}}
    for trial in result.status.trials:
        alone = train(parse_job({**document, "seed": trial.parameters["seed"]}, folder=tmp_path))
        assert alone.summary.metrics["accuracy"] == trial.value
