"""`make test-repeat`: a test, also of one parameter, runs as often as asked, or until it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from repeating import original

FAILS_AT_THE_THIRD = """
import pathlib, pytest

@pytest.mark.parametrize("kind", ["a-1", "b"])
def test_counts(kind, record_property):
    seen = pathlib.Path(__file__).with_name(f"seen-{kind}")
    seen.write_text(seen.read_text() + "." if seen.exists() else ".")
    assert kind == "b" or len(seen.read_text()) < 3

def test_alone():
    pass
"""


@pytest.mark.parametrize(
    ("repeated", "name"),
    [
        ("t.py::f[7-200]", "t.py::f"),
        ("t.py::T::f[4-7-200]", "t.py::T::f[4]"),
        ("t.py::f[a-1-2-7-200]", "t.py::f[a-1-2]"),
        ("t.py::f", "t.py::f"),
    ],
)
def test_a_repetition_has_the_name_of_its_test(repeated: str, name: str) -> None:
    assert original(repeated) == name


@pytest.mark.slow
def test_a_test_runs_until_it_fails(tmp_path: Path) -> None:
    module = tmp_path / "test_counting.py"
    module.write_text(FAILS_AT_THE_THIRD)
    (tmp_path / "conftest.py").write_text("")

    def repeat(name: str, *options: str) -> tuple[int, str]:
        command = [sys.executable, str(Path(__file__).with_name("repeating.py")), f"{module}::{name}", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout

    status, said = repeat("test_counts[a-1]", "--count", "50")
    assert status == 1
    assert "1 failed, 2 passed" in said
    assert "3 of 50 repetitions, " in said
    assert "def test_counts(kind" in said, "the failure is shown"
    assert not (tmp_path / "seen-b").exists()
    status, said = repeat("test_counts[b]", "--count", "6")
    assert (status, "6 passed" in said, (tmp_path / "seen-b").read_text()) == (0, True, "......")
    status, said = repeat("test_alone", "--count", "20", "--jobs", "2")
    assert (status, "20 passed" in said) == (0, True)
