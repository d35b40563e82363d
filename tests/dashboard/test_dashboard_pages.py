"""Documents of all pages, and requests to end something."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_worlds import PRICES, started, troubled_run, write_executor, write_run, write_study

pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")
pytest.importorskip("msgspec", reason="the extra `dashboard` is not installed")
testclient = pytest.importorskip("starlette.testclient", reason="starlette's test client needs httpx", exc_type=Exception)

from ephemeron.dashboard.app import make_app  # noqa: E402
from ephemeron.dashboard.library import Library  # noqa: E402
from ephemeron.dashboard.phases import COLUMNS  # noqa: E402
from ephemeron.dashboard.stream import events  # noqa: E402
from ephemeron.events import GroupStarted, Invoked, RegionExchanged, Traffic, to_json  # noqa: E402
from ephemeron.runs.folders import RunFolder  # noqa: E402
from ephemeron.runs.lock import driving  # noqa: E402


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "runs" / "r", troubled_run())
    (run / "logs").mkdir()
    (run / "logs" / "i0.txt").write_text("first\n<b>second</b>\n")
    live = write_run(tmp_path / "runs" / "live", troubled_run()[:-1])
    write_study(tmp_path / "studies" / "s", {0: run, 2: live})
    return tmp_path


@pytest.fixture
def client(root: Path) -> Iterator[testclient.TestClient]:
    with testclient.TestClient(make_app(Library([root]))) as found:
        yield found


def test_runs_and_trials_are_found_once(client: testclient.TestClient) -> None:
    rows = {row["run_id"]: row for row in client.get("/api/runs").json()["runs"]}
    assert set(rows) == {"r", "live"}
    assert (rows["r"]["study"], rows["r"]["trial"]) == ("0/studies/s", 0)
    assert rows["live"]["loss"] == pytest.approx(1.1)
    assert rows["live"]["status"] == "interrupted"


def test_a_run_has_all_its_parts(client: testclient.TestClient) -> None:
    at = {"key": "0/runs/r"}
    run = client.get("/api/run", params=at).json()
    assert (run["iterations_done"], run["budget_usd"], run["ranks"], run["generation"]) == (4, 0.01, [0, 1], 1)
    assert run["generations"][0]["request"] == "wide"
    assert len(client.get("/api/run/series", params=at).json()["loss"]["value"]) == 4
    assert [r["status"] for r in client.get("/api/run/functions", params=at).json()["rows"]] == ["unknown", "lost", "unknown"]
    assert len(client.get("/api/run/marks", params=at).json()["marks"]) == 4
    tile = client.get("/api/run/tile", params={**at, "level": -6, "index": 0})
    rows = int(tile.headers["x-rows"])
    assert len(tile.content) == 2 * rows * COLUMNS
    assert set(tile.content) > {0, 1}


def test_output_of_a_function_is_read_on_from_an_offset(client: testclient.TestClient, root: Path) -> None:
    at = {"key": "0/runs/r", "invocation": "i0"}
    first = client.get("/api/run/output", params=at).json()
    assert first["text"] == "first\n<b>second</b>\n"
    with (root / "runs" / "r" / "logs" / "i0.txt").open("a") as file:
        file.write("third\n")
    assert client.get("/api/run/output", params={**at, "offset": first["offset"]}).json()["text"] == "third\n"
    assert client.get("/api/run/output", params={"key": "0/runs/r", "invocation": "i1"}).json()["there"] is False


@pytest.mark.parametrize("invocation", ["../run", "../../../etc/passwd", "i9", ""])
def test_only_output_of_the_runs_invocations_is_read(client: testclient.TestClient, invocation: str) -> None:
    assert client.get("/api/run/output", params={"key": "0/runs/r", "invocation": invocation}).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/api/run?key=0/runs/none",
        "/api/run?key=../../etc",
        "/api/run/series",
        "/api/study?key=0/runs/r",
        "/api/stream?topic=all",
        "/static/..%2Fapp.py",
        "/static/%2e%2e%2fapp.py",
        "/static/none.js",
        "/api/run/tile?key=0/runs/r&level=99",
        "/api/run/tile?key=0/runs/r&index=x",
    ],
)
def test_what_is_not_there_is_refused_in_one_line(client: testclient.TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code in (400, 404)
    assert "Traceback" not in response.text
    assert "\n" not in response.text


def test_a_study_has_its_trials_with_their_runs(client: testclient.TestClient) -> None:
    study = client.get("/api/study", params={"key": "0/studies/s"}).json()
    assert study["state"] == "interrupted", "no client holds its lock"
    assert [(t["number"], t["state"], t["key"]) for t in study["trials"]] == [
        (0, "finished", "0/runs/r"),
        (1, "pruned", ""),
        (2, "running", "0/runs/live"),
    ]
    assert (study["best_value"], study["counts"]) == (0.9, {"finished": 1, "pruned": 1, "running": 1})
    curves = client.get("/api/study/curves", params={"key": "0/studies/s"}).json()["curves"]
    assert [c["trial"] for c in curves] == [0, 2]


def test_a_running_trial_is_ended_by_its_file_and_no_other(client: testclient.TestClient, root: Path) -> None:
    for number, status in ((0, 409), (1, 409), (7, 409), ("2", 404), (2, 200)):
        response = client.post("/api/study/end", json={"key": "0/studies/s", "trial": number})
        assert response.status_code == status, response.text
    assert (root / "runs" / "live" / "end").exists()
    assert not (root / "runs" / "r" / "end").exists()
    trial = client.get("/api/study", params={"key": "0/studies/s"}).json()["trials"][2]
    assert trial["ending"] is True


def test_a_run_that_does_not_run_is_not_ended(client: testclient.TestClient) -> None:
    response = client.post("/api/run/end", json={"key": "0/runs/r"})
    assert (response.status_code, response.json()) == (409, {"error": "run r is not running"})
    assert client.post("/api/run/end", content=b"no json").status_code == 400
    assert client.get("/api/run/end").status_code == 405


def test_new_runs_and_new_lines_are_seen(client: testclient.TestClient, root: Path) -> None:
    key = "0/runs/late"
    assert client.get("/api/run", params={"key": key}).status_code == 404
    folder = write_run(root / "runs" / "late", troubled_run()[:3])
    assert client.get("/api/run", params={"key": key}).json()["functions"]["invocations"] == 1
    rest = write_run(root / "rest", troubled_run()[3:])
    with (folder / "events.jsonl").open("ab") as file:
        file.write((rest / "events.jsonl").read_bytes())
    assert client.get("/api/run", params={"key": key}).json()["iterations_done"] == 4


def test_the_depth_of_a_queue_is_read_from_names(client: testclient.TestClient, root: Path) -> None:
    folder = write_run(root / "tasks" / "map-1", [Invoked(t=0.0, rank=0, attempt=0, invocation="x")])
    work = folder / "objects" / "map-1.work"
    work.mkdir(parents=True)
    for name in ("a-10", "b-5", "b-5.l1", "b-5.h1.3", "c-7", "c-7.l1", "c-7.x1", "closed"):
        (work / name).touch()
    found = client.get("/api/tasks").json()["tasks"][0]
    assert found["depth"] == {"ready": 17, "leased": 5, "batches": 3, "closed": True, "announced": 0}
    assert found["invocations"] == 1
    assert "history" not in found, "none of what does not change any more"


@pytest.mark.parametrize("status", ["finished", "stopped", "failed", "interrupted"])
def test_an_executor_that_has_ended_has_its_own_status_and_its_cost(client: testclient.TestClient, root: Path, status: str) -> None:
    write_executor(root / "runs" / "linalg-1", status)
    found = client.get("/api/tasks").json()["tasks"][0]
    assert (found["status"], found["is_running"], found["name"], found["key"]) == (status, False, "linalg", "0/runs/linalg-1")
    assert (found["cost_usd"], found["budget_usd"]) == (0.00123, 0.5)
    assert found["result"] == {"tasks": 7, "failed": 2, "cancelled": 1}
    assert (found["causes"], found["depth"]) == (["ValueError: three"], None)


def test_an_executor_that_runs_is_as_far_as_its_client_says_and_costs_until_now(client: testclient.TestClient, root: Path) -> None:
    folder = RunFolder(write_executor(root / "runs" / "map-2", "finished"))
    begun = [started(1, 0), Invoked(t=0.0, rank=0, attempt=0, invocation="x")]
    folder.events.write_text("".join(to_json(event) + "\n" for event in begun))
    (folder.path / "result.json").unlink()
    header = {**(folder.read("run.json") or {}), "started_at": time.time() - 60}
    folder.write("run.json", header)
    folder.write("progress.json", {"tasks": 7, "of": 40})
    with driving(folder):
        (row,) = [row for row in client.get("/api/runs").json()["runs"] if row["run_id"] == "map-2"]
        (task,) = client.get("/api/tasks").json()["tasks"]
    assert (row["status"], row["iterations"], row["planned"]) == ("running", 7, 40)
    assert row["seconds"] >= 60
    assert row["cost_usd"] >= 60 * 1e-5
    assert task["cost_usd"] >= 60 * 1e-5


def test_a_run_of_several_groups_shows_each(client: testclient.TestClient, root: Path) -> None:
    groups = [
        GroupStarted(
            name=name,
            platform=name,
            first_rank=rank,
            workers=1,
            memory_mb=1024,
            iterations=4,
            samples=50,
            servers=0,
            prices=PRICES,
            traffic=Traffic(),
        )
        for rank, name in enumerate(("aws", "ray"))
    ]
    sent = RegionExchanged(t=5.0, rank=1, attempt=0, iteration=4, bytes_sent=700, bytes_received=500, seconds=0.5, staleness=2)
    write_run(root / "runs" / "grouped", [started(groups=groups), *troubled_run()[1:-1], sent])
    rows = {row["run_id"]: row["groups"] for row in client.get("/api/runs").json()["runs"]}
    assert rows == {"r": 0, "live": 0, "grouped": 2}
    found = client.get("/api/run", params={"key": "0/runs/grouped"}).json()["groups"]
    assert [(g["name"], g["first_rank"], g["iterations"]) for g in found] == [("aws", 0, 4), ("ray", 1, 4)]
    assert found[1]["cost_usd"] > 0
    assert [(g["exchanges"], g["staleness"], g["wan_bytes_sent"]) for g in found] == [(0, 0, 0), (1, 2, 700)]
    assert found[0]["waiting_share"] == 0 < found[1]["waiting_share"] < 1
    assert found[1]["steps_per_s"] > 0


def test_pages_without_anything_are_empty(tmp_path: Path) -> None:
    with testclient.TestClient(make_app(Library([tmp_path / "none"]))) as client:
        assert client.get("/api/runs").json() == {"runs": []}
        assert client.get("/api/studies").json() == {"studies": []}
        assert client.get("/api/services").json() == {"services": []}
        assert client.get("/api/tasks").json() == {"tasks": []}


def test_a_stopped_data_service_shows_its_stored_flows(client: testclient.TestClient, root: Path) -> None:
    folder = root / "data-service"
    folder.mkdir()
    (folder / "flows.json").write_text(json.dumps({"flows": [{"name": "digits", "version": 2, "state": "accessed", "samples": 9}]}))
    found = client.get("/api/services").json()["services"][0]
    assert (found["running"], found["flows"][0]["flow"], found["flows"][0]["state"]) == (False, "digits", "stopped")


async def following(root: Path) -> list[str]:
    pages = make_app(Library([root])).state.pages
    found: list[str] = []
    async for message in events(pages, "run", "0/runs/live"):
        found.append(message.decode())
        if len(found) == 2:
            rest = write_run(root / "rest", troubled_run()[-1:])
            with (root / "runs" / "live" / "events.jsonl").open("ab") as file:
                file.write((rest / "events.jsonl").read_bytes())
        if len(found) == 3:
            pages.over.set()
    return found


def test_a_stream_has_a_document_for_each_change_and_ends_with_the_dashboard(root: Path) -> None:
    retry, first, second = asyncio.run(asyncio.wait_for(following(root), 60))
    assert retry.startswith("retry: ")
    for message in (first, second):
        head, data = message.split("\n", 1)
        assert head == "event: document"
        assert message.endswith("\n\n")
        assert json.loads(data.removeprefix("data: "))["run_id"] == "live"


def test_the_stream_of_an_unknown_run_says_so(root: Path) -> None:
    async def read() -> list[bytes]:
        return [m async for m in events(make_app(Library([root])).state.pages, "run", "0/none")]

    assert asyncio.run(read())[-1] == b"event: gone\ndata: {}\n\n"
