"""A log as aggregates: the same numbers as the bill and the report, whatever the pieces in which it was read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from dashboard_worlds import progress, started, troubled_run, write_run

pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")

from ephemeron.dashboard import run_documents
from ephemeron.dashboard.run_view import RunView
from ephemeron.events import Progress
from ephemeron.training.report import read_events
from ephemeron.training.report.metrics import learning


def read(folder: Path, limit: int = 1 << 20) -> RunView:
    view = RunView(folder)
    while view.advance(limit):
        pass
    return view


def test_cost_and_metrics_are_those_of_the_result(run_folder: Path) -> None:
    result = json.loads((run_folder / "result.json").read_text())
    found = run_documents.summary(read(run_folder))
    assert found["cost_usd"] == pytest.approx(result["cost_usd"], rel=1e-6)
    assert found["seconds"] == pytest.approx(result["seconds"], abs=1e-3)
    assert found["iterations_done"] == result["iterations"]
    assert found["metrics"]["loss"] == pytest.approx(result["metrics"]["loss"], rel=1e-6)
    assert found["status"] == "finished"
    assert found["functions"]["replacements"] == 1
    assert found["traffic"]["puts"] == result["traffic"]["puts"]


def test_the_loss_is_that_of_the_report(run_folder: Path) -> None:
    expected = learning((e for e in read_events(run_folder / "events.jsonl") if isinstance(e, Progress)), ())
    curve = run_documents.series(read(run_folder))["loss"]
    assert curve["iteration"] == [i for i, _ in expected.loss]
    assert curve["value"] == pytest.approx([loss for _, loss in expected.loss], rel=1e-4)


def test_small_pieces_give_the_same_as_the_whole(run_folder: Path) -> None:
    whole, pieces = read(run_folder), read(run_folder, limit=700)
    assert pieces.version > whole.version
    for document in (run_documents.summary, run_documents.series, run_documents.marks, run_documents.function_table):
        one, other = document(whole), document(pieces)
        for found in (one, other):
            found.pop("version")
        assert one.pop("cost", 0) == other.pop("cost", 0) or document is run_documents.series
        assert one == other


def test_a_repeated_iteration_takes_the_place_of_its_predecessor(tmp_path: Path) -> None:
    events = [started(), progress(0, 0, 1.0), progress(1, 0, 3.0, samples=30), progress(1, 0, 5.0, attempt=1, samples=30)]
    late = progress(1, 0, 100.0, attempt=0, samples=30)
    view = read(write_run(tmp_path / "r", [*events, late]))
    assert run_documents.series(view)["loss"]["value"] == [pytest.approx((10 * 1.0 + 30 * 5.0) / 40)]


def test_a_repetition_in_a_later_reading_counts_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [started(), progress(0, 0, 1.0), progress(0, 1, 1.0)])
    view = read(folder)
    more = write_run(tmp_path / "other", [progress(0, 1, 7.0, attempt=1), progress(0, 2, 3.0, attempt=1)])
    with (folder / "events.jsonl").open("ab") as file:
        file.write((more / "events.jsonl").read_bytes())
    while view.advance():
        pass
    assert run_documents.series(view)["loss"]["value"] == [1.0, 7.0, 3.0]


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    view = read(write_run(tmp_path / "r", [started(), progress(0, 0, 1.0), progress(0, 1, math.nan), progress(0, 2, 2.0)]))
    assert run_documents.series(view)["loss"]["value"] == [1.0, None, 2.0]
    assert run_documents.summary(view)["loss"] == 2.0


def test_lines_that_are_no_events_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", [started()])
    with (folder / "events.jsonl").open("a") as file:
        file.write(
            '{"kind":"progress","t":"late"}\nnot json\n{"kind":"unheard of"}\n\n' + '{"kind":"note","t":1,"level":"info","text":"x"}\n'
        )
    found = run_documents.summary(read(folder))
    assert found["unread"] == 3
    assert [n["text"] for n in found["notes"]] == ["x"]


def test_marks_are_faults_ends_replacements_and_generations(tmp_path: Path) -> None:
    found = run_documents.marks(read(write_run(tmp_path / "r", troubled_run())))["marks"]
    assert [(m["kind"], m["rank"]) for m in found] == [("fault", 1), ("bad", 1), ("replacement", 1), ("generation", None)]


def test_a_log_that_was_begun_anew_replaces_what_was_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", troubled_run())
    view = read(folder)
    before = view.version
    again = write_run(tmp_path / "other", [started(), progress(0, 0, 9.0)])
    (again / "events.jsonl").replace(folder / "events.jsonl")
    while view.advance():
        pass
    assert view.version > before
    assert run_documents.summary(view)["loss"] == 9.0
    assert run_documents.marks(view)["marks"] == []


def test_a_planned_run_has_its_prediction(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", troubled_run())
    assert run_documents.summary(read(folder))["predicted"] is None
    predicted = {"seconds": 12.5, "cost_usd": 0.02, "iterations": 4}
    (folder / "plan.json").write_text(json.dumps({"workers": 2, "predicted": predicted}))
    assert run_documents.summary(read(folder))["predicted"] == {"seconds": 12.5, "cost_usd": 0.02}
