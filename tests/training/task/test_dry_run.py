"""A dry run finds what would fail on functions, and starts nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no PyTorch; pip install 'ephemeron[torch]'")

from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError, PlanInfeasible, RunFailed
from ephemeron.runs.folders import runs_folder
from ephemeron.training.driver import dry_run, train

CODE = Path(__file__).parent / "code"


@pytest.fixture(autouse=True)
def here(monkeypatch, home):
    monkeypatch.chdir(CODE)
    monkeypatch.syspath_prepend(str(CODE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Random", "step 0 gave other gradients when it was repeated from the same state, first in 0.weight"),
        ("Remembers", "step 1 gave other gradients when it was repeated from the same state"),
    ],
)
def test_programs_that_functions_could_not_replace_are_refused(name, says):
    with pytest.raises(JobError) as caught:
        dry_run(f"broken:{name}", workers=2, batch_size=8)
    assert says in str(caught.value)


@pytest.mark.slow
def test_the_quota_is_that_of_a_function():
    with pytest.raises(PlanInfeasible, match="two steps need more than the 512 MB of a function"):
        dry_run("broken:Large", workers=2, batch_size=8, memory_mb=512)


def test_a_loss_that_is_no_number():
    with pytest.raises(JobError, match=r"the loss of training_step is of shape \[2\]; return a scalar tensor"):
        dry_run("broken:Vector", workers=2, batch_size=8)


@pytest.mark.slow
def test_what_would_be_started_and_paid():
    done = CliRunner().invoke(main, ["train", "broken:Saves", "--workers", "2", "--batch-size", "8", "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["iterations"], found["samples"], found["test_samples"]) == (30, 96, 24)
    assert set(found["first_steps"]["evaluation"]) == {"loss", "absolute_error", "rmse"}
    assert found["first_steps"]["losses"][1] > 0
    assert 0 < found["estimate"]["requests_usd"] < found["estimate"]["cost_usd"] == found["cost_usd"]
    assert (found["kind"], found["functions"], found["invocations"]) == ("training", 2, 2)
    assert 0 < found["memory_mb"] < found["quota_mb"]
    assert [basis["source"] for basis in found["rests_on"]] == ["measured", "assumed", "prices"]
    assert not runs_folder().exists()
    shown = CliRunner().invoke(main, ["train", "broken:Saves", "--workers", "2", "--dry-run"]).stdout
    assert "an iteration, as measured; functions $" in shown
    assert "nothing was started or paid for" in shown


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["simulated", "local"])
def test_an_error_of_the_program_names_line_rank_iteration_and_samples(platform):
    with pytest.raises(RunFailed) as caught:
        train("broken:LaterError", workers=2, batch_size=8, platform=platform)
    said = str(caught.value)
    assert "ValueError: too large" in said
    assert "broken.py, line" in said
    assert "in iteration 3: epoch 0, batch 3 of 6: 8 training samples" in said
    assert "training samples" in said
