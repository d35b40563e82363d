"""Executors are runs of kind `tasks`: listed, billed, shown, stopped and cleaned like others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from ephemeron import FunctionExecutor
from ephemeron.cli.main import main
from ephemeron.dashboard.library import Library
from ephemeron.errors import RunStopped, TaskFailed, UserError
from ephemeron.events import Invoked
from ephemeron.executor import drivers
from ephemeron.functions.local import is_hosted
from ephemeron.runs import folders, verbs
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.header import open_header
from ephemeron.runs.status import status_of
from running import until

WAITS = """
import os, sys, time
import ephemeron

def wait(number):
    while True:
        time.sleep(0.05)

with ephemeron.FunctionExecutor(max_workers=1, name="waits") as pool:
    future = pool.submit(wait, 1)
    print(pool.folder, flush=True)
    try:
        future.result()
    except ephemeron.EphemeronError as e:
        print(type(e).__name__, e)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def invoke(*arguments: str) -> str:
    ran = CliRunner().invoke(main, list(arguments))
    assert ran.exit_code == 0, ran.output
    return ran.output


def rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in invoke("runs", "--json").splitlines()]


def test_an_executor_is_listed_with_its_kind_status_and_bill(home: Path) -> None:
    with FunctionExecutor("simulated", name="sweep", max_workers=2) as pool:
        assert pool.submit(abs, -1).result(60) == 1
        assert [(row["kind"], row["status"]) for row in rows()] == [("tasks", "running")]
        assert list(pool.map(abs, range(5))) == [0, 1, 2, 3, 4]
    [row] = rows()
    assert {name: row[name] for name in ("kind", "job", "status", "platform", "workers", "parent")} == {
        "kind": "tasks",
        "job": "sweep",
        "status": "finished",
        "platform": "simulated",
        "workers": 2,
        "parent": "",
    }
    bill = pool.bill()
    [folder] = folders.all_runs()
    meter = CostMeter(bill_prices := open_header(folder).prices)
    for event in folders.events_of(folder):
        meter.feed(event)
    assert meter.cost_usd(row["seconds"]) == pytest.approx(bill.cost_usd, abs=2e-6), bill_prices.name  # type: ignore[arg-type]
    assert row["run_id"].startswith("sweep-")
    assert (row["cost_usd"], row["invocations"]) == (pytest.approx(bill.cost_usd, abs=1e-9), bill.invocations)
    assert "sweep-" in invoke("runs")
    [shown] = Library([home]).rows()
    assert (shown["kind"], shown["status"], shown["cost_usd"]) == ("tasks", "finished", row["cost_usd"])


def test_failed_and_cancelled_tasks_are_in_its_status(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FunctionExecutor("simulated", max_workers=1, retries=0) as pool:
        with pytest.raises(TaskFailed, match="ZeroDivisionError"):
            pool.submit(divmod, 1, 0).result(60)
        assert pool.submit(divmod, 7, 2).result(60) == (3, 1)
    [folder] = folders.all_runs()
    result = folder.read("result.json")
    assert (result["status"], result["tasks"], result["failed"]) == ("failed", 1, 1)
    assert "ZeroDivisionError" in result["causes"][0]
    monkeypatch.setattr(drivers, "_QUIET_S", 60)  # nothing begins before the end
    pool = FunctionExecutor("simulated", max_workers=1)
    futures = pool.map_futures(abs, range(3))
    assert futures[2].cancel()
    pool.shutdown()
    result = folders.find("last").read("result.json")
    assert (result["status"], result["tasks"], result["cancelled"]) == ("stopped", 2, 1)


def test_last_is_the_newest_run_of_a_kind_that_the_command_can_use(home: Path) -> None:
    trained = folders.create("trained")
    trained.write("run.json", {"run_id": "trained", "kind": "training", "platform": "local"})
    with FunctionExecutor("simulated", max_workers=1) as pool:
        pool.submit(abs, -1).result(60)
    assert folders.find("last").run_id == pool.folder.name
    assert folders.find("last", kinds=folders.MODELS) == trained


def test_simulated_executors_can_be_stopped_too(home: Path) -> None:
    with FunctionExecutor("simulated", max_workers=1) as pool:
        assert pool.submit(abs, -1).result(60) == 1
    with pytest.raises(UserError, match="is not running"):
        verbs.stop("last")
    assert verbs.attach("last").summary.status == "finished"


def test_what_is_left_unused_is_removed_and_what_is_forked_is_refused(home: Path) -> None:
    unused = FunctionExecutor("simulated")
    with FunctionExecutor("simulated", max_workers=1) as pool:
        assert pool.submit(abs, -1).result(60) == 1
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            said = "no error"
            try:
                pool.submit(abs, -2)
            except RuntimeError as e:
                said = str(e)
            unused.shutdown()
            os.write(write, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert f"this executor is of process {os.getpid()}" in os.read(read, 1000).decode()
        assert unused.folder.exists(), "a child removes nothing of its parent"
        assert status_of(folders.find(pool.folder.name)) == "running"
    unused.shutdown()
    assert not unused.folder.exists()


FORGETS = """
import ephemeron

pool = ephemeron.FunctionExecutor(max_workers=1, name="forgets")
print(pool.submit(pow, 2, 3).result())
"""


@pytest.mark.slow
def test_an_executor_that_nobody_shuts_down_ends_with_its_program(home: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", FORGETS], capture_output=True, text=True, check=True, timeout=200)
    assert (ran.stdout, ran.stderr) == ("8\n", "")
    result = folders.find("last").read("result.json")
    assert (result["status"], result["tasks"]) == ("finished", 1)


@pytest.mark.slow
def test_an_executor_is_stopped_by_the_command_and_told_so(home: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    name = Path(process.stdout.readline().strip()).name
    seen: list[object] = []
    watching = threading.Thread(target=lambda: seen.append(verbs.attach(name, check=False)))
    watching.start()
    assert "stopped" in invoke("stop", name)
    assert process.stdout.read().strip() == f"RunStopped run {name} was stopped"
    assert process.wait(120) == 0
    watching.join(120)
    [result] = seen
    assert result.summary.status == "stopped"  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"kind tasks.* cannot be resumed"):
        verbs.resume(name)
    assert RunStopped(name).run_id == name
    assert "wrote" in invoke("report", name)
    invoke("logs", name)


@pytest.mark.slow
def test_an_executor_whose_client_was_killed_is_interrupted(home: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = folders.RunFolder(Path(process.stdout.readline().strip()))
    until(
        lambda: is_hosted(folder.path) and folder.events.exists() and any(isinstance(event, Invoked) for event in folders.events_of(folder))
    )
    os.kill(process.pid, signal.SIGKILL)
    process.wait(120)
    assert status_of(folder) == "running", "its function computes"
    with pytest.raises(UserError, match="now by: ephemeron stop"):
        verbs.attach(folder.run_id)
    assert verbs.stop(folder.run_id) == folder.run_id
    assert status_of(folder) == "interrupted"
    with pytest.raises(UserError, match="its client has ended"):
        verbs.attach(folder.run_id)
    with pytest.raises(UserError, match="is not running"):
        verbs.stop(folder.run_id)
    [row] = rows()
    assert row["cost_usd"]
    assert folder.read("result.json")["tasks"] is None
