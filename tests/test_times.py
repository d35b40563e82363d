"""What the fast lane has cost when it was measured last (`make test-times`): no test and no module of it takes long."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

TIMES = Path(__file__).parent / "times"
MOST_S = {"test": 10.0, "module": 60.0}


@pytest.mark.parametrize("what", ["test", "module"])
def test_nothing_in_the_fast_lane_takes_long(what: str) -> None:
    took: dict[str, float] = defaultdict(float)
    for name, (wall_s, *_) in json.loads((TIMES / "fast.json").read_text())["each"].items():
        took[name if what == "test" else name.partition("::")[0]] += wall_s
    late = {name: round(s, 1) for name, s in took.items() if s > MOST_S[what]}
    assert late == {}, f"mark what is slow, or make it quicker: at most {MOST_S[what]} s per {what}"


@pytest.mark.parametrize("lane", ["fast", "slow"])
def test_lanes_are_measured(lane: str) -> None:
    """Order and balance come from these figures: where most modules are missing, `make test-times`."""
    found = json.loads((TIMES / f"{lane}.json").read_text())
    assert found["fields"] == ["wall_s", "cpu_s", "processes", "peak_mb"]
    measured = {name.partition("::")[0] for name in found["each"]}
    root = TIMES.parent.parent
    there = {
        path.relative_to(root).as_posix() for path in TIMES.parent.rglob("test_*.py") if lane == "fast" or "mark.slow" in path.read_text()
    }
    missing = there - measured
    assert len(missing) < len(there) / 5, sorted(missing)
