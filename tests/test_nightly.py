"""`make test-nightly`: its parts end in time, say what they did not reach, and print how a failure is repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import chaos_schedules

import nightly
import soak
from benchmark_runs import LONG
from nightly import EACH, FULL_MATRIX, PARTS, ROOT, SCHEDULES, Found, call, main, turned


def test_an_hour_is_enough_for_all_parts() -> None:
    assert sum(minutes for _, minutes in PARTS.values()) <= 58
    assert sum(EACH[kind] for kind, _ in SCHEDULES.values()) >= 10_000


def test_every_kind_of_schedule_is_there() -> None:
    kinds = {first for name, first in vars(chaos_schedules).items() if name.endswith("_FROM")}
    assert {first for kind, first in SCHEDULES.values() if kind == "simulated"} == {0} | kinds


def test_the_matrix_has_all_tests_of_which_the_lanes_run_a_part() -> None:
    says = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and ("from random_schedules" in (text := path.read_text()) or "EPHEMERON_FULL_MATRIX" in text)
    ]
    assert set(says) <= set(FULL_MATRIX)
    assert [path for path in FULL_MATRIX if not (ROOT / path).exists()] == []


def test_each_day_begins_with_another() -> None:
    assert turned([], 3) == []
    firsts = [turned("abcde", day) for day in range(5)]
    assert sorted(first[0] for first in firsts) == list("abcde")
    assert all(sorted(each) == list("abcde") for each in firsts)


def test_a_command_is_interrupted_at_its_limit_with_what_it_started() -> None:
    status, lines = call(["sh", "-c", "sleep 1000 & echo begun; wait"], 0.5)
    assert status is None
    assert lines in ([], ["begun"]), "what was printed by then; that the pipe is closed says that all have ended"
    assert call([sys.executable, "-c", "import os; print(os.environ['A']); raise SystemExit(3)"], 60, A="b") == (3, ["b"])


def test_the_summary_has_what_failed_and_what_was_not_reached(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def part(day: int, seconds: float) -> Found:
        asked.append((day, seconds))
        return Found("3 of 5 done", ["python -m again"], ["two others"])

    monkeypatch.setattr(nightly, "PARTS", {"one": (part, 20.0), "two": (lambda *_: Found("all done"), 20.0)})
    assert main(["--only", "one", "two", "--minutes", "6", "--date", "2026-11-28"]) == 1
    assert asked == [(739948, 120.0)]
    said = capsys.readouterr().out.partition("== night of 2026-11-28: 1 failed\n")[2]
    assert said.splitlines() == [
        "one: 3 of 5 done, 1 failed, in 0.0 of 2.0 minutes",
        "    not reached: two others",
        "    FAILED python -m again",
        "two: all done, 0 failed, in 0.0 of 2.0 minutes",
    ]
    assert main(["--only", "two"]) == 0


def test_a_failed_schedule_is_printed_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def chaos(command: list[str], limit_s: float) -> tuple[int, list[str]]:
        kind, count = command[command.index("--only") + 1], command[command.index("--schedules") + 1]
        asked.append(int(command[command.index("--seed") + 1]))
        if kind == "damaged":
            return 0, ["damaged: 50 schedules, 0 failed"]
        if asked[-1] >= 7_000_000:
            return 1, [
                "simulated schedule failed: --only simulated --seed 7000001 --schedules 1: ends",
                f"simulated: {count} schedules, 1 failed",
            ]
        return 0, [f"simulated: {count} schedules, 0 failed"]

    monkeypatch.setattr(nightly, "call", chaos)
    found = nightly.schedules(739948, 60)
    assert found.done == "9050 of 10000 schedules"
    assert found.failures == ["python -m benchmarks.chaos --only simulated --seed 7000001 --schedules 1: ends"]
    assert found.missed == ["950 of 1000 schedules with a damaged object"]
    assert len({seed // 1_000_000 for seed in asked}) == 6, "each kind has its million"


def test_what_fails_and_what_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"siren": (1, ["no such file"]), "starts": (None, []), "tests/training/test_groups.py": (1, ["FAILED tests/t.py::f[a b] - no"])}
    monkeypatch.setattr(nightly, "call", lambda command, limit_s, **_: next((ends[word] for word in command if word in ends), (0, [])))
    found = nightly.benchmarks(739948, 60)
    assert (found.failures, found.missed) == (["python tests/benchmark_runs.py siren"], ["starts"])
    found = nightly.matrix(739948, 60)
    assert found.failures == ["EPHEMERON_FULL_MATRIX=1 python -m pytest -n 0 'tests/t.py::f[a b]'"]
    assert nightly.benchmarks(739948, 1).missed == nightly.turned(list(LONG), 739948)


def test_what_grows_is_named() -> None:
    flat = [soak.Held(5, 40, 600.0 + n % 3, 20) for n in range(30)]
    assert soak.grown(flat) == []
    leaking = [soak.Held(5, 40 + n, 600.0, 20 + n // 10) for n in range(30)]
    assert soak.grown(leaking) == ["descriptors: 44 after 10 runs, 65 after 35", "files: 20 after 10 runs, 22 after 35"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simulated", "session"])
def test_nothing_grows(kind: str) -> None:
    done = subprocess.run([sys.executable, "tests/soak.py", kind, "--seconds", "1"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{kind}: ")
