"""Metrics that programs report are shown under their names."""

from __future__ import annotations

from ephemeron.events import Evaluated, Event, Measured, Progress, RunStarted
from ephemeron.prices import load_prices
from ephemeron.training.report.html import render_html
from ephemeron.training.report.run_summary import RunSummary


def story(*events: Event) -> RunSummary:
    started = RunStarted(t=0, run_id="r", job="j", workers=2, aggregators=1, memory_mb=512, iterations=8, epochs=2, samples=10)
    return RunSummary.from_events([started, *events], load_prices("objects"))


def test_merged_metrics_replace_means_and_have_a_table() -> None:
    slices = [Evaluated(t=1, rank=r, attempt=0, epoch=1, iteration=4, samples=5, sums={"loss": (5.0, 5), "f1": None}) for r in (0, 1)]
    merged = Measured(t=2, rank=0, attempt=0, epoch=1, iteration=4, metrics={"loss": 1.0, "f1": 0.7512})
    told = story(*slices, merged)
    assert told.learning.evaluations[0].metrics == {"loss": 1.0, "f1": 0.7512}
    page = render_html(told, None)
    assert "F1" in page
    assert "0.7512" in page
    assert "ccuracy" not in page


def test_a_program_without_a_loss_in_its_evaluation_has_its_own_metric_and_no_gap() -> None:
    part = Evaluated(t=1, rank=0, attempt=0, epoch=1, iteration=4, samples=5, sums={"distance": (10.0, 5)})
    page = render_html(story(part), None)
    assert "Distance" in page
    assert "ccuracy" not in page


def test_a_run_without_evaluations_shows_no_accuracy() -> None:
    assert "ccuracy" not in render_html(story(), None)


def test_numbers_of_iterations_and_evaluations_have_a_curve_each() -> None:
    done = {"epoch": 0, "samples": 5, "version": 0, "loss": 1.0}
    steps = [Progress(t=i, rank=r, attempt=0, iteration=i, metrics={"rate": 0.5 + i + r}, **done) for i in range(3) for r in (0, 1)]
    told = story(*steps, Evaluated(t=4, rank=0, attempt=0, epoch=1, iteration=4, samples=5, sums={"rate": (10.0, 5), "loss": (5.0, 5)}))
    assert dict(told.learning.curves) == {"train/rate": ((1, 1), (2, 2), (3, 3)), "evaluation/rate": ((4, 2),)}
    page = render_html(told, None, origin={"command": "ephemeron train <job>.toml", "commit": "0123-dirty"})
    for words in ("of iterations", "of evaluations", "ephemeron train &lt;job&gt;.toml", "0123-dirty"):
        assert words in page
