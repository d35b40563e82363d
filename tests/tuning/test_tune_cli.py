"""The command `ephemeron tune`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tuning_worlds import write_study

from ephemeron.cli.main import main
from ephemeron.runs.folders import all_runs

pytest.importorskip("optuna", reason="tuning needs Optuna; pip install 'ephemeron[tuning]'")

GRID: dict[str, Any] = {"sampler": "grid", "space": {"optimizer.options.lr": [0.01, 0.1]}}


def tune(path: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["tune", str(path), *more])


@pytest.mark.slow
def test_json_has_the_keys_that_programs_read(home: Path, tmp_path: Path) -> None:
    path = write_study(tmp_path / "s", **GRID)
    dry = tune(path, "--dry-run", "--json")
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.stdout.splitlines()[-1])["trials"] == 2
    assert not all_runs()
    done = tune(path, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["best"].keys() >= {"value", "parameters"}
    assert document["trials"] == {"finished": 2, "pruned": 0, "failed": 0}
    assert document["seconds"] > 0 < document["cost_usd"]
    again = tune(path)
    assert again.exit_code == 2
    assert "has ended (finished); begin another one with --out FOLDER" in again.output
    watched = tune(path, "--attach")
    assert watched.exit_code == 0
    assert f"best: accuracy {document['best']['value']:.6g} with optimizer.options.lr" in watched.output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--resume"], "there is no study in"),
        (["--attach"], "there is no study in"),
        (["--attach", "--resume"], "--resume and --attach exclude each other"),
        (["--end-trial", "0"], "trial 0 of the study in"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(home: Path, tmp_path: Path, more: list[str], message: str) -> None:
    done = tune(write_study(tmp_path / "s", **GRID), *more)
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1


def test_a_dry_run_measures_nothing_unless_told(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measured steps of the job for 80 seconds, though nothing is started."""
    monkeypatch.setattr("ephemeron.training.profiling.profile_job", lambda *args, **how: pytest.fail("it measures"))
    done = tune(write_study(tmp_path / "s", **{**GRID, "predict": True}), "--dry-run")
    assert done.exit_code == 0, done.output
    assert "has no profile of platform" in done.output
    assert "--dry-run --profile" in done.output


def test_predictions_are_printed_before_anything_starts(home: Path, tmp_path: Path) -> None:
    done = tune(write_study(tmp_path / "s", **{**GRID, "predict": True, "budget_usd": 0.5}), "--dry-run", "--profile")
    assert done.exit_code == 0, done.output
    for words in ("2, grid", "\ncheapest ", "\ndearest ", "without pruning", "budget $0.5", "\nrests on ", "profile)"):
        assert words in done.output
    assert not all_runs()
