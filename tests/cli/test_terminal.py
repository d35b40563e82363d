"""Texts that hold brackets or colons are printed as they are."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import ephemeron.cli
from ephemeron.cli.cloud import commands
from ephemeron.cli.main import main
from ephemeron.cli.progress import Display
from ephemeron.cli.terminal import make_console, text_of
from ephemeron.events import Ended, FaultFired, Note, RunStarted

HARD = "pip install 'x[ray]' [red]no[/red] [/] layers[0] :smile: [link=http://a]"


def test_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_installed", lambda module: False)
    out = CliRunner().invoke(main, ["cloud", "list"]).stdout
    for extra in ("ray,torch", "lithops,torch", "aws,torch", "torch"):
        assert f"'ephemeron[{extra}]'" in out


def test_consoles_print_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table("a [b]", box=None, pad_edge=False)
    table.add_row(HARD)
    console = make_console(width=200)
    console.print(table)
    console.print(HARD, soft_wrap=True)
    console.print(text_of((HARD, "bold"), HARD), soft_wrap=True)
    out = capsys.readouterr().out
    assert out.count(HARD) == 4
    assert "a [b]" in out


def test_progress_prints_what_it_is_given() -> None:
    file = io.StringIO()
    display = Display(Console(file=file, width=400, highlight=False, markup=False, emoji=False))
    place = {"rank": 0, "attempt": 0}
    for event in (
        RunStarted(t=0, run_id=HARD, job="j", workers=1, aggregators=1, memory_mb=1, iterations=1, epochs=1, samples=1, notes=[HARD]),
        Note(t=0, level="error", text=HARD),
        Note(t=1, level="warning", text=HARD),
        Ended(t=0, invocation="i", status="lost", error=HARD, **place),
        FaultFired(t=0, fault=HARD, **place),
    ):
        display.on_event(event)
    assert file.getvalue().count(HARD) == 5, "the second note says the same"


def test_every_console_is_made_in_one_place() -> None:
    folder = Path(ephemeron.cli.__file__).parent
    makers = [p.name for p in folder.rglob("*.py") if re.search(r"(?<!\w)Console\(", p.read_text())]
    assert makers == ["terminal.py"]
