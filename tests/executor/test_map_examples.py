"""The programs in `examples/map/`, in virtual time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def program(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / "map" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    yield
    sys.modules.pop("sweep", None)


def test_the_sweep_finds_the_degree(capsys):
    program("sweep").main("simulated")
    assert capsys.readouterr().out.startswith("degree  6")


def test_the_sweep_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES / "map")
    out = tmp_path / "scores.jsonl"
    command = ["map", "sweep:score", "--items", "grid.jsonl", "--out", str(out), "--platform", "simulated"]
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(scores) == 18
    assert min(scores, key=lambda s: s["error"])["degree"] in (5, 7)
    for text in ("ephemeron map sweep:score --items grid.jsonl --out scores.jsonl", "python words.py", "python sweep.py"):
        assert text in (EXAMPLES / "map" / "README.md").read_text()


def test_the_word_count_is_that_of_one_process(tmp_path, capsys):
    words = program("words")
    files = []
    for n in range(9):
        files.append(tmp_path / f"{n}.txt")
        files[-1].write_text("the cat and the dog. " * (n + 1))
    words.main([str(f) for f in files], "simulated")
    assert capsys.readouterr().out.splitlines()[:2] == ["    90  the", "    45  cat"]


def test_the_simulation_ends_when_its_mean_is_known(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow", reason="results are kept as Parquet")
    pytest.importorskip("matplotlib", reason="the picture")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("example_waiting", EXAMPLES / "simulation" / "waiting.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example_waiting", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CUSTOMERS", 50)
    monkeypatch.setattr(sys, "argv", ["waiting.py", "--platform", "simulated", "--width", "40%", "--most", "400", "--out", "s"])
    module.main()
    said = capsys.readouterr().out
    assert said.startswith("mean ")
    assert "0 before" in said
    assert (tmp_path / "s" / "waiting.png").stat().st_size > 10_000
    module.main()
    assert "0 shops computed now" in capsys.readouterr().out
