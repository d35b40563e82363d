"""The files of a report: whole, self-contained, escaped, and written whatever the run came to."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_runs as runs

from ephemeron.errors import MissingExtra, RunNotFound
from ephemeron.events import Event, Note, to_json
from ephemeron.training.report import PICTURE_VARIABLE, RunSummary, read_events, render_html, write_png, write_report
from ephemeron.training.report.headline import Headline, usd

RUNS = [runs.clean, runs.replaced, runs.relayed, runs.stopped, runs.failed, runs.launched, runs.running, runs.many, list]
VOID = {"meta", "input", "br", "link"}


class Balance(HTMLParser):
    """Complains of a tag that is closed wrongly or never."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def page(events: list[Event], result: dict[str, Any] | None = None) -> str:
    return render_html(RunSummary.from_events(events, runs.PRICES), result)


def parsed(html: str) -> Balance:
    balance = Balance()
    balance.feed(html)
    balance.close()
    assert not balance.open
    return balance


@pytest.mark.parametrize("make", RUNS)
def test_page_is_well_formed_and_fetches_nothing(make: Callable[[], list[Event]]) -> None:
    html = page(make())
    parsed(html)
    assert not re.search(r"https?://|//cdn|@import|url\(|\bsrc=|\bhref=", html)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", html, flags=re.S).lower().split()


@pytest.mark.parametrize("make", RUNS)
def test_picture_is_written(make: Callable[[], list[Event]], tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    write_png(RunSummary.from_events(make(), runs.PRICES), None, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 8_000


def test_text_from_outside_is_escaped() -> None:
    evil = "<script>alert('x')</script>&\""
    events = runs.clean(job=evil)
    events.append(Note(t=1.0, level="warning", text=evil))
    result = {"run_id": evil, "status": evil, "channel": evil, evil: evil, "settings": {evil: 1.0}}
    html = page(events, result)
    assert parsed(html).seen.count("script") == 1
    assert "alert('x')</script>" not in html


def test_long_timeline_stays_small() -> None:
    html = page(runs.clean(workers=8, iterations=1500, epochs=3))
    assert "each column merges" in html
    assert len(html) < 1_600_000
    assert html.count("<rect") < 7_000


def test_relays_replacements_and_faults_are_marked() -> None:
    assert "rank 0, attempt 1 (relay): ok, relayed" in page(runs.relayed())
    html = page(runs.replaced())
    for words in ("(replacement)", "injected fault: kill", "rank 2 was lost; replaced", "Memory quotas are not enforced"):
        assert words in html


def test_failure_shows_its_cause() -> None:
    html = page(runs.failed())
    assert "ImportError: no model &lt;here&gt;" in html
    assert "4 functions of 704 MB finished no iteration" in html


def test_summary_is_one_sentence() -> None:
    story = RunSummary.from_events(runs.clean(), runs.PRICES)
    result = {"workers": 4, "memory_mb": 704, "iterations": 690, "seconds": 31.2, "cost_usd": 0.0018, "metrics": {"accuracy": 0.978}}
    assert Headline.of(story, result).summary == ("4 functions of 704 MB trained 690 iterations in 31.2 s for $0.0018: accuracy 0.978.")


def test_result_may_hold_anything() -> None:
    odd = {"seconds": None, "cost_usd": "dear", "metrics": [], "workers": True, "billed": None, "phases_s": 3}
    assert "trained 60 iterations" in page(runs.clean(), odd)


def test_result_from_before_a_resume_is_not_used() -> None:
    run = runs.Run()
    run.launch(t=50.0)
    story = RunSummary.from_events([*runs.stopped(), *run.events], runs.PRICES)
    figures = Headline.of(story, {"status": "stopped", "seconds": 3.0, "channel": "folder"})
    assert (figures.status, figures.seconds) == ("running", 50.0)


@pytest.mark.parametrize(
    ("amount", "words"), [(0, "$0"), (0.00182, "$0.00182"), (0.0018, "$0.0018"), (0.5, "$0.50"), (1234.5, "$1,234.50")]
)
def test_usd(amount: float, words: str) -> None:
    assert usd(amount) == words


def folder(tmp_path: Path, events: list[Event], tail: str = "") -> Path:
    (tmp_path / "events.jsonl").write_text("".join(to_json(e) + "\n" for e in events) + tail)
    return tmp_path


def test_report_of_a_folder(pictures: None, tmp_path: Path) -> None:
    run = folder(tmp_path, runs.clean())
    (run / "result.json").write_text(json.dumps({"metrics": {"accuracy": 0.5}}))
    files = write_report(run, prices=runs.PRICES)
    assert files == [run / "report.html", run / "report.png"]
    assert "accuracy 0.500" in files[0].read_text()
    elsewhere = write_report(run, run / "out" / "deep", prices=runs.PRICES)
    assert [f.name for f in elsewhere if f.parent == run / "out" / "deep"] == ["report.html", "report.png"]


def test_a_report_without_its_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PICTURE_VARIABLE, "0")
    run = folder(tmp_path, runs.clean())
    assert write_report(run, prices=runs.PRICES) == [run / "report.html"]
    assert not (run / "report.png").exists()


def test_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    events = runs.stopped()
    run = folder(tmp_path, events, tail='{"kind":"progress","t":1.2,"ra')
    (run / "result.json").write_text('{"run_')
    assert read_events(run / "events.jsonl") == events
    assert write_report(run, prices=runs.PRICES)


def test_other_bad_lines_are_told(tmp_path: Path) -> None:
    good = to_json(runs.launched()[0])
    (tmp_path / "events.jsonl").write_text(f'{good}\n{{"kind":"pro{good}\n[]\n{{"kind":"note","t":1,"new":2}}\n\n{good}\n')
    *events, note = read_events(tmp_path / "events.jsonl")
    assert len(events) == 2
    assert isinstance(note, Note)
    assert note.text == "events.jsonl: could not read line 2, 3, 4"


def test_folder_without_events(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"events\.jsonl is missing"):
        write_report(tmp_path, prices=runs.PRICES)


def test_without_matplotlib_the_page_alone_is_written(pictures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = folder(tmp_path, runs.clean())
    with pytest.raises(MissingExtra, match=r"ephemeron\[report\]"):
        write_png(RunSummary.from_events(runs.clean(), runs.PRICES), None, tmp_path / "a.png")
    assert write_report(run, prices=runs.PRICES) == [run / "report.html"]
