"""Ending a real run from a page."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import ephemeron
from ephemeron.events import Event, Progress
from tiny_job import JOB

pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")
pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")
testclient = pytest.importorskip("starlette.testclient", reason="starlette's test client needs httpx", exc_type=Exception)

from ephemeron.dashboard.app import make_app  # noqa: E402
from ephemeron.dashboard.library import Library  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("now", [False, True])
def test_a_running_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: bool) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path))
    trains = threading.Event()
    results = []

    def on_event(event: Event) -> None:
        if isinstance(event, Progress):
            trains.set()

    def train() -> None:
        results.append(ephemeron.train(JOB, platform="local", workers=2, batch_size=16, epochs=2000, on_event=on_event, check=False))

    thread = threading.Thread(target=train)
    thread.start()
    assert trains.wait(240)
    with testclient.TestClient(make_app(Library([tmp_path]))) as client:
        (row,) = client.get("/api/runs").json()["runs"]
        assert row["status"] == "running"
        response = client.post("/api/run/end", json={"key": row["key"], "now": now})
        assert response.status_code == 200, response.text
        thread.join(120)
        assert not thread.is_alive()
        after = client.get("/api/run", params={"key": row["key"]}).json()
    assert results[0].summary.status == after["status"] == "stopped"
