"""Training on Lithops' localhost backend: the same weights when functions die and hand over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lithops", reason="no Lithops; pip install 'ephemeron[lithops]'")

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.events import Ended, FaultFired, Invoked
from ephemeron.job import DataSpec, Job, Simulation, Target, parse_fault
from ephemeron.platforms.lithops.settings import LithopsSettings
from ephemeron.training import configure, train

CODE = Path(__file__).parents[2] / "training" / "code"
JOB = Job(
    name="lithops", model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=1, code=(CODE,),
    optimizer=Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}), simulation=Simulation(),
)  # fmt: skip
HOW = {"platform": "lithops", "workers": 2, "aggregators": 2, "batch_size": 36, "memory_mb": 768, "checkpoint_every": 4}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    monkeypatch.setenv("LITHOPS_CONFIG", "{}")  # none of the machine's own


def go(tmp_path: Path, *faults: str, **how: Any) -> tuple[Any, list[Any]]:
    events: list[Any] = []
    c = configure(JOB, **{**HOW, "channel": (tmp_path / "objects").as_uri(), **how})
    settings = LithopsSettings(every_s=0.1, places=8)
    result = train(JOB, c, faults=[parse_fault(f) for f in faults], on_event=events.append, cloud=settings)
    return result, events


def test_a_run_and_the_same_one_with_a_death_and_a_duplicate(tmp_path: Path) -> None:
    calm, events = go(tmp_path)
    assert (calm.summary["status"], calm.summary["platform"]) == ("finished", "lithops")
    assert [e.outcome for e in events if isinstance(e, Ended)] == ["finished"] * 2
    rough, events = go(tmp_path, "kill:rank=0,iteration=7,phase=aggregate", "duplicate:rank=1")
    assert rough.summary["status"] == "finished", rough.causes
    assert rough.summary["weights_sha256"] == calm.summary["weights_sha256"]
    assert [e for e in events if isinstance(e, FaultFired)]
    assert [e.status for e in events if isinstance(e, Ended)].count("lost") == 1
    assert [e.reason for e in events if isinstance(e, Invoked)].count("replacement") == 1


def test_what_functions_could_not_reach_or_have_no_place_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="channel 'folder' has no address"):
        go(tmp_path, channel="folder")
    with pytest.raises(PlanInfeasible, match="8 functions may run at once"):
        go(tmp_path, workers=8)
    c = configure(JOB, **{**HOW, "channel": (tmp_path / "objects").as_uri()})
    with pytest.raises(JobError, match="functions of aws_lambda cannot reach it"):
        train(JOB, c, cloud=LithopsSettings(backend="aws_lambda"))
