"""Predicted against measured: like with like, and one table wherever it is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import plans
import pytest
import report_runs as runs
from rich.console import Console

from ephemeron.cli.progress import Display
from ephemeron.cli.runs.listing import print_phases
from ephemeron.config.typed import build
from ephemeron.events import to_json
from ephemeron.runs.folders import RunFolder
from ephemeron.training.driver import Result
from ephemeron.training.driver.records import ResultSummary
from ephemeron.training.report import write_report
from ephemeron.training.report.prediction import ComparisonRow, compare, render_text, rows


def told(summary: dict[str, Any] | None = None, **more: Any) -> dict[str, ComparisonRow]:
    predicted = plans.choice(**more).predicted
    return {r.name: r for r in rows(predicted, plans.SUMMARY if summary is None else summary)}


def planned(folder: Path, summary: dict[str, Any] | None = None, **more: Any) -> Path:
    """A run's folder as it lies there when the run is over."""
    plans.plan(choice=plans.choice(**more)).save(folder / "plan.json")
    (folder / "result.json").write_text(json.dumps(summary or plans.SUMMARY))
    (folder / "events.jsonl").write_text("".join(to_json(e) + "\n" for e in runs.clean()))
    return folder


def test_totals() -> None:
    r = told()
    assert (r["time"].predicted, r["time"].measured) == (152.3, 140.0)
    assert r["time"].error == pytest.approx(152.3 / 140 - 1)
    assert r["iterations"].error == 0
    assert (r["puts"].predicted, r["puts"].measured) == (6000, 5900)
    assert (r["invocations"].predicted, r["invocations"].measured) == (8, 8)


def test_parts_of_the_cost_add_up_on_both_sides() -> None:
    r = told()
    for side in ("predicted", "measured"):
        parts = getattr(r["cost of functions"], side) + getattr(r["cost of storage and requests"], side)
        assert parts == pytest.approx(getattr(r["cost"], side))


def test_phases_are_compared_with_the_mean_of_the_functions_that_have_them() -> None:
    r = told()
    assert r["compute"].measured == 600 / 8
    assert r["load"].measured == 16 / 8
    assert r["aggregate"].measured == 44 / 2
    assert (r["wait"].predicted, r["wait"].measured, r["wait"].error) == (None, 203 / 8, None)
    assert (r["start"].measured, r["start"].error) == (None, None)


def test_errors_of_nothing() -> None:
    r = told()
    assert r["polls"].error is None, "1,300 predicted, none measured: no share of 0"
    assert told({"traffic": {"polls": 0}}, predicted=plans.predicted(polls=0))["polls"].error == 0


@pytest.mark.parametrize("summary", [{}, {"phases_s": 3, "cost_usd": "dear", "workers": None, "billed": []}])
def test_a_partial_summary_is_no_mistake(summary: dict[str, Any]) -> None:
    r = told(summary)
    assert all(row.measured is None for row in r.values())
    assert render_text(list(r.values()))


def test_text_is_aligned_and_narrow() -> None:
    text = render_text(list(told().values()))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "+8.8%" in lines[1]
    error = lines[0].index("error") + len("error")
    assert all(len(line) == error for line in lines if line != "by phase")
    assert lines.index("by phase") < lines.index(next(line for line in lines if "compute" in line))
    assert render_text([]).split() == ["predicted", "measured", "error"]


def test_far_off_is_told_as_a_factor() -> None:
    r = told({"seconds": 1.523})
    assert "100×" in render_text([r["time"]])


def test_a_folder_without_a_plan_has_no_comparison(tmp_path: Path) -> None:
    assert compare(tmp_path, plans.SUMMARY) is None
    (tmp_path / "plan.json").write_text('{"work')
    assert compare(tmp_path, plans.SUMMARY) is None
    (tmp_path / "plan.json").write_text("[]")
    assert compare(tmp_path, plans.SUMMARY) is None


def test_notes_say_why_the_two_differ(tmp_path: Path) -> None:
    same = compare(planned(tmp_path), plans.SUMMARY)
    assert same is not None
    assert same.notes == ()
    other = compare(tmp_path, {**plans.SUMMARY, "workers": 4, "status": "stopped"})
    assert other is not None
    assert "not finished (stopped)" in other.notes[0]
    assert "workers 4 instead of 8" in other.notes[1]


def test_the_page_shows_it(tmp_path: Path) -> None:
    page = write_report(planned(tmp_path), prices=runs.PRICES)[0].read_text()
    assert "Predicted and measured" in page
    assert "phase: aggregate" in page
    assert "+8.8%" in page
    (tmp_path / "plan.json").unlink()
    assert "Predicted and measured" not in write_report(tmp_path, prices=runs.PRICES)[0].read_text()


def test_the_page_escapes_what_the_plan_says(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    page = write_report(planned(tmp_path, pattern=evil), prices=runs.PRICES)[0].read_text()
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_run_ends_with_it_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path)
    said = io.StringIO()
    summary = build(ResultSummary, plans.SUMMARY, where="result.json")
    Display(Console(file=said, width=80)).conclude(Result(summary, RunFolder(tmp_path)))
    text = said.getvalue()
    assert "predicted  measured" in text
    assert "cost of storage and requests" in text
    assert capsys.readouterr().out == ""
    (tmp_path / "plan.json").unlink()
    said.truncate(0)
    Display(Console(file=said, width=80)).conclude(Result(summary, RunFolder(tmp_path)))
    assert "predicted" not in said.getvalue()


def test_report_prints_it_below_the_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path)
    print_phases(RunFolder(tmp_path))
    out = capsys.readouterr().out
    assert out.index("share") < out.index("predicted  measured")
    assert "critical path" in out
    assert max(map(len, out.splitlines())) <= 80
