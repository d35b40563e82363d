"""Small studies: a job of four epochs in virtual time, whose trials take a tenth of a second each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ephemeron.config.toml import toml_text
from ephemeron.runs.folders import RunFolder, all_runs
from ephemeron.tuning import Study

CODE = Path(__file__).parents[1] / "training" / "code"
JOB: dict[str, Any] = {
    "name": "tiny",
    "model": "tiny:mlp",
    "code": [str(CODE)],
    "epochs": 4,
    "seed": 0,
    "optimizer": {"target": "SGD", "options": {"lr": 0.1, "momentum": 0.9}},
    "simulation": {"compute": {"a": 50.0, "b": 4.0, "m": 0.0}},
    "run": {"platform": "simulated", "workers": 1, "batch_size": 480, "memory_mb": 1769},
}
RATES = {"optimizer.options.lr": {"low": 1e-4, "high": 1.0, "log": True}}


def trial_runs() -> list[RunFolder]:
    """Runs of trials, newest first."""
    return [run for run in all_runs() if (run.read("run.json") or {}).get("parent")]


MakeStudy = Callable[..., Study]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own; reports without pictures, which take a second each."""
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    return tmp_path / "home"


def write_study(folder: Path, *, job: dict[str, Any] | None = None, **values: Any) -> Path:
    """Writes `job.toml` and `study.toml`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.toml").write_text(toml_text({**JOB, **(job or {})}))
    study = {"job": "job.toml", "metric": "accuracy", "mode": "max", "predict": False, **values}
    if study.get("sampler") != "grid":
        study.setdefault("trials", 6)
    study.setdefault("space", RATES)
    (folder / "study.toml").write_text(toml_text(study))
    return folder / "study.toml"


@pytest.fixture
def make_study(home: Path, tmp_path: Path) -> MakeStudy:
    """Makes a study that has not begun; `name` is that of its folder."""

    def made(name: str = "a", **values: Any) -> Study:
        return Study.open(write_study(tmp_path / name, **values), out=tmp_path / name / "out")

    return made
