"""Studies are runs of kind `study`, and their trials parts of them: listed, billed, shown, stopped, continued and cleaned like others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tuning_worlds import trial_runs, write_study

from ephemeron.cli.main import main
from ephemeron.dashboard.library import Library
from ephemeron.dashboard.studies import Studies
from ephemeron.errors import JobError, RunNotFound, UserError
from ephemeron.events import Invoked, RunEnded, to_json
from ephemeron.runs import folders, verbs
from ephemeron.runs.header import open_header
from ephemeron.runs.lock import driving
from ephemeron.tuning import Study
from running import until

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")

GRID: dict[str, Any] = {"sampler": "grid", "space": {"optimizer.options.lr": [0.01, 0.1]}, "concurrency": 1}
GATED = """
import time
from pathlib import Path
from torch import nn

class Gated(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.folder, self.passes = Path(folder), 0

    def forward(self, x):
        self.passes += 1
        if self.passes == 8:
            (self.folder / "reached").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        return self.inner(x)

def build(folder):
    return Gated(folder)
"""
CLIENT = Path(sys.executable).with_name("ephemeron")


def invoke(*arguments: str, code: int = 0) -> str:
    ran = CliRunner().invoke(main, list(arguments))
    assert ran.exit_code == code, ran.output
    return ran.output


def rows() -> dict[str, dict[str, Any]]:
    return {row["run_id"]: row for row in map(json.loads, invoke("runs", "--json").splitlines())}


def inventory_of(name: str) -> list[str]:
    """Kinds of things of this name that `runs clean` lists."""
    items = map(json.loads, invoke("runs", "clean", "--dry-run", "--json").splitlines())
    return [item["kind"] for item in items if item["name"] == name]


@pytest.mark.slow
def test_a_study_is_listed_with_its_kind_and_bill_and_its_trials_are_its_parts(home: Path, tmp_path: Path) -> None:
    invoke("tune", str(write_study(tmp_path / "s", **GRID, name="rates", budget_usd=1.0)))
    found = rows()
    study = found.pop("rates")
    assert {name: study[name] for name in ("kind", "status", "parent", "platform", "job", "workers")} == {
        "kind": "study",
        "status": "finished",
        "parent": "",
        "platform": "simulated",
        "job": "rates",
        "workers": 1,
    }
    assert [(row["kind"], row["parent"]) for row in found.values()] == [("training", "rates")] * 2
    assert study["cost_usd"] > 0
    assert study["cost_usd"] == pytest.approx(sum(row["cost_usd"] for row in found.values()))
    assert study["invocations"] == sum(row["invocations"] for row in found.values()) == 2
    result = json.loads(invoke("attach", "rates", "--json").splitlines()[-1])
    assert (result["state"], result["trials"], result["metric"]) == ("finished", {"finished": 2}, "accuracy")
    best = json.loads((home / "runs" / "rates" / "study.json").read_text())["best"]
    assert result["best"] == best
    assert result["best_value"] == pytest.approx(max(row["metrics"]["accuracy"] for row in found.values()))
    assert folders.find("rat").run_id == "rates", "the study, not one of its trials"
    assert folders.find("rates-1").run_id in found
    assert folders.find("last", kinds=folders.MODELS).run_id in found
    assert open_header(folders.find("rates")).budget_usd == 1.0
    assert "parallel-coordinates.svg" in invoke("report", "rates")
    assert "have printed nothing" in invoke("logs", "rates")
    library = Library([home])
    [shown] = library.studies()
    assert sorted(run.path.name for run in library.trials(shown)) == sorted(found)
    assert {row["study"] for row in library.rows()} == {"0/runs/rates"}
    [page] = Studies(library).rows()
    assert (page["state"], page["counts"], page["spent_usd"]) == ("finished", {"finished": 2}, study["cost_usd"])
    assert "has finished; there is nothing to resume" in invoke("resume", "rates", code=2)
    assert "is not running" in invoke("stop", "rates", code=2)
    assert json.loads(invoke("runs", "clean", "rates", "--dry-run", "--json"))["objects"] == 0
    invoke("runs", "clean", "rates", "--folder", "--yes")
    assert rows().keys() == found.keys()


def test_a_study_in_another_folder_is_listed_and_that_folder_stays(home: Path, tmp_path: Path) -> None:
    path = write_study(tmp_path / "s", trials=1)
    Study.open(path, out=tmp_path / "out").run()
    [study] = [run for run in folders.all_runs() if run.read("run.json")["kind"] == "study"]  # type: ignore[index]
    assert folders.find("study") == study
    assert study.path.resolve() == (tmp_path / "out").resolve()
    assert [open_header(run).parent for run in trial_runs()] == [study.run_id]
    invoke("runs", "clean", study.run_id, "--folder", "--yes")
    with pytest.raises(RunNotFound):
        folders.find(study.run_id)
    assert (tmp_path / "out" / "best.toml").exists()


def test_a_study_of_an_earlier_release_goes_on_where_it_is(home: Path, tmp_path: Path) -> None:
    """It has `study.json`, its storage and links to trials, and no header."""
    path = write_study(tmp_path / "s", trials=2, concurrency=1, name="old")
    earlier = home / "studies" / "old"

    def end(trial: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Study.open(path, out=earlier).run(on_trial=end)
    for name in ("run.json", "events.jsonl", "driver.lock"):
        (earlier / name).unlink()
    (home / "runs" / "old").unlink()
    assert inventory_of("old") == ["study"]
    result = Study.open(path).run(resume=True)
    assert result.status.state == "finished"
    assert rows()["old"]["status"] == "finished"
    assert inventory_of("old") == ["run"], "once"
    assert (earlier / "best.toml").exists()
    assert Study.open(path).status == result.status


def test_the_output_of_a_study_is_that_of_its_trials(home: Path) -> None:
    study = folders.create("s")
    for number in (0, 10, 2):
        trial = folders.create(f"s-{number}")
        trial.write("run.json", {"run_id": trial.run_id, "kind": "training", "platform": "local", "parent": "s"})
        invoked = Invoked(t=0.0, rank=1, attempt=0, invocation="first")
        trial.events.write_text(to_json(invoked) + "\n")
        (trial.path / "logs").mkdir()
        (trial.path / "logs" / "first.txt").write_text(f"says {number}\n")
        (study.path / "trials").mkdir(exist_ok=True)
        (study.path / "trials" / str(number)).symlink_to(trial.path)
    study.write("run.json", {"run_id": "s", "kind": "study", "platform": "local"})
    said = [f"trial {number}, rank 1 | says {number}" for number in (0, 2, 10)]
    assert invoke("logs", "s").splitlines() == said


def test_a_name_that_another_run_has_is_refused(home: Path, tmp_path: Path) -> None:
    folders.create("taken").write("run.json", {"run_id": "taken", "kind": "training", "platform": "local"})
    with pytest.raises(JobError, match="is a run and no study; give the study another name"):
        Study.open(write_study(tmp_path / "s", **GRID, name="taken")).run()


@pytest.mark.slow
def test_a_study_of_which_no_trial_finishes_has_failed(home: Path, tmp_path: Path) -> None:
    space = {"model.options.passes": [9]}
    invoke("tune", str(write_study(tmp_path / "s", sampler="grid", space=space, job={"model": "tiny:nan_after"}, name="nan")), code=1)
    assert rows()["nan"]["status"] == "failed"
    assert "no trial has finished" in invoke("attach", "nan", code=1)
    assert "no trial of study nan has a value yet" in invoke("report", "nan", code=2)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes study files whose trials wait at their eighth pass; the best of such a study that nothing disturbs."""
    place = tmp_path_factory.mktemp("gated")
    (place / "code").mkdir()
    (place / "code" / "gated.py").write_text(GATED)

    def made(name: str, *, opened: bool = False) -> Path:
        (place / name).mkdir()
        if opened:
            (place / name / "go").touch()
        job = {"model": {"target": "gated:build", "options": {"folder": str(place / name)}}, "code": [str(place / "code")]}
        return write_study(place / name, **GRID, name=name, job=job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(place / "home"))
        whole = Study.open(made("whole", opened=True)).run()
        assert whole.best is not None
        yield made, whole


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "stop --now", "Ctrl-C", "SIGTERM", "SIGKILL"])
def test_a_study_that_ends_early_is_continued_by_its_name(how: str, gated: Any) -> None:
    made, whole = gated
    name = how.translate({ord(c): None for c in " -"})
    path = made(name)
    process = subprocess.Popen([CLIENT, "tune", str(path), "--json"], env=dict(os.environ), stdout=subprocess.PIPE)
    until((path.parent / "reached").exists)
    assert rows()[name]["status"] == "running"
    seen: list[Any] = []
    watching = threading.Thread(target=lambda: seen.append(verbs.attach(name, check=False)))
    if how.startswith("stop"):
        watching.start()
        invoke(*how.split(), name, "--no-wait")
    else:
        process.send_signal(signal.SIGINT if how == "Ctrl-C" else signal.Signals[how])
    (path.parent / "go").touch()
    process.wait(240)
    study = Study.open(path)
    if how.startswith("SIG"):
        assert (rows()[name]["status"], study.status.state) == ("interrupted", "running")
        invoke("attach", name)
    else:
        assert process.returncode == 3
        assert (rows()[name]["status"], study.status.state) == ("stopped", "stopped")
        assert not [t for t in study.trials if t.state in ("pruned", "failed")]
        assert study.status.spent_usd > 0
        assert study.status.spent_usd == pytest.approx(sum(t.cost_usd for t in study.trials))
        assert rows()[name]["cost_usd"] == study.status.spent_usd
        if seen or watching.ident:
            watching.join(240)
            assert seen[0].summary.status == "stopped"
        invoke("resume", name)
    assert rows()[name]["status"] == "finished"
    now = study.status
    assert [(t.state, t.value, t.cost_usd) for t in now.trials] == [(t.state, t.value, t.cost_usd) for t in whole.status.trials]
    assert (now.best, now.spent_usd) == (whole.status.best, pytest.approx(whole.status.spent_usd))
    ends = [event.status for event in folders.events_of(folders.find(name)) if isinstance(event, RunEnded)]
    assert ends == (["finished"] if how.startswith("SIG") else ["stopped", "finished"])


def test_a_request_to_stop_needs_a_client_and_is_heeded_by_the_next_one_alone(home: Path, tmp_path: Path) -> None:
    study = Study.open(write_study(tmp_path / "s", **GRID, name="asked"))

    def ask(trial: object) -> None:
        verbs.stop("asked", wait=False)

    assert study.run(on_trial=ask).status.state == "stopped"
    with pytest.raises(UserError, match="is not running"):
        verbs.stop("asked")
    assert study.run(resume=True).status.state == "finished"


def test_a_study_that_is_over_gets_its_result_and_one_that_another_client_drives_is_refused_by_its_name(home: Path, tmp_path: Path) -> None:
    study = Study.open(write_study(tmp_path / "s", trials=1, name="driven"))
    study.run()
    result = folders.find("driven").path / "result.json"
    whole = json.loads(result.read_text())
    result.unlink()  # as if its client had been killed before it wrote it
    invoke("attach", "driven")
    assert json.loads(result.read_text()) == whole
    with driving(folders.find("driven")), pytest.raises(UserError, match="run driven is already running as process"):
        study.run(resume=True)
