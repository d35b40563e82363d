"""A `map` that functions of a cloud drive: the client's files are gone, and the function that drives is killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.events import Ended
from ephemeron.runs import detached
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.verbs import attach
from ephemeron.testing.training_world import driver_function

_WORDS = "import time\n\ndef slow(number):\n    time.sleep(0.4)\n    return number * number\n"
_ITEMS = 60


def check_detached_map(where: Sequence[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts it, kills its driver, attaches, and compares its results.

    Args:
        where: options of the platform and its channel.
        place: an empty folder for the client.
        monkeypatch: of the test.
    """
    words = f"{_WORDS}\nNUMBER = {hash(place)}\n"  # what functions have driven is recorded in the store, where a repetition of this test would find it
    (place / "words.py").write_text(words)
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(_ITEMS)))
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr(detached, "CLOUD_BEAT_S", detached.BEAT_S)
    command = ["map", "words:slow", "--items", "items.jsonl", "--out", "out.jsonl", "--max-workers", "2", *where, "--json"]
    said = CliRunner().invoke(main, [*command, "--detach"])
    assert said.exit_code == 0, said.output
    run = json.loads(said.output.splitlines()[-1])["run_id"]
    (place / "words.py").unlink()
    (place / "items.jsonl").unlink()
    function = driver_function(run)
    assert function is not None
    function.kill()
    result = attach(run)
    assert (result.summary.status, result.summary.tasks) == ("finished", _ITEMS)
    assert (place / "out.jsonl").read_text() == "".join(f"{n * n}\n" for n in range(_ITEMS))
    ends = [e.outcome for e in events_of(RunFolder(result.folder.path / detached.FOLDER)) if isinstance(e, Ended) and e.status == "ok"]
    assert "finished" in ends
    assert "failed" not in ends, "it was driven there"
    argv = json.loads((result.folder.path / "run.json").read_text())["payload"]["program"]["argv"]
    assert str(place) not in json.dumps(argv)
    (place / "words.py").write_text(words)
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(_ITEMS)))
    again = CliRunner().invoke(main, command)
    told = json.loads(again.stdout)
    assert (told["computed"], told["recorded"], told["run_id"]) == (0, _ITEMS, ""), "what functions have driven is recorded for all"
