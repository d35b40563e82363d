"""What runs say of models that are no classifiers: a loss, and no accuracy that is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import make_job

from ephemeron.cli.progress import Display
from ephemeron.training.driver import configure, train
from ephemeron.training.job import DataSpec, Target


@pytest.mark.parametrize("length", [6, 4])
def test_a_language_model_has_a_loss_and_no_accuracy(home: Path, length: int, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_job(
        model=Target(target="tiny:words_model"),
        loss=Target(target="tiny:words_loss"),
        data=DataSpec(source="tiny:sequences", options={"length": length}),
    )
    c = configure(job, platform="simulated", workers=2, aggregators=1, batch_size=8)
    with Display() as display:
        result = train(job, c, on_event=display.on_event)
    display.conclude(result)
    assert result.finished
    assert result.summary.metrics["accuracy"] is None
    assert 1.0 < result.summary.metrics["loss"] < 2.5
    shown = capsys.readouterr().err
    assert "test loss" in shown
    assert "accuracy" not in shown
    page = (result.folder.path / "report.html").read_text()
    assert "Test loss" in page
    assert "ccuracy" not in page
