"""Runs of every kind that functions drive: the commands return, functions die, and results are those of a run with a client."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.communication.channels import open_channel
from ephemeron.communication.signing import create_key
from ephemeron.config.typed import plain
from ephemeron.errors import JobError, PlatformError, RunAlreadyDriven, UserError
from ephemeron.events import Ended, Event, Invoked, Note, Progress, RunEnded, RunStarted, to_json
from ephemeron.executor import programs
from ephemeron.executor.kind import TasksSummary
from ephemeron.executor.programs import Launch
from ephemeron.functions.jsonl import begin_again
from ephemeron.functions.local import is_hosted
from ephemeron.runs import detached, folder_copies, folders, run_platform, verbs
from ephemeron.runs.client_run import summarized
from ephemeron.runs.driver_function import DriverRecords, prefix_of
from ephemeron.runs.folder_copies import FolderCopy
from ephemeron.runs.folders import RunFolder, events_of
from ephemeron.runs.header import RunHeader, open_header, write_header
from ephemeron.runs.kinds import find_kind
from ephemeron.runs.lock import hold, is_driven
from ephemeron.runs.status import status_of
from ephemeron.runs.summary import RunResult, read_summary, write_summary
from ephemeron.testing.training_world import driver_function
from ephemeron.training.driver.api import resize
from running import until, until_async
from sparse_data import prepared

pytestmark = pytest.mark.cold_start  # driver functions give commands of this folder's environment

WORDS = """
import time

def slow(number):
    with open("PLACE/ran.txt", "a") as ran:
        ran.write(f"{number}\\n")
    time.sleep(0.4)
    return number * number
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def given(place: Path, *arguments: str) -> str:
    """A command in a process of its own, which has ended."""
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "ephemeron.cli.main", *arguments], cwd=place, capture_output=True, text=True, check=False, timeout=500
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def detach(place: Path, *arguments: str) -> RunFolder:
    told = json.loads(given(place, *arguments, "--detach", "--json").splitlines()[-1])
    assert told["detached"] is True, "as JSON says it"
    folder = folders.find(told["run_id"])
    assert open_header(folder).detached
    return folder


def rows() -> dict[str, dict[str, Any]]:
    said = CliRunner().invoke(main, ["runs", "--json"])
    return {row["run_id"]: row for row in map(json.loads, said.output.splitlines())}


def drivers(folder: RunFolder) -> RunFolder:
    return RunFolder(folder.path / detached.FOLDER)


def over(folder: RunFolder) -> None:
    """Waits until no function drives a run any more."""
    until(lambda: not is_driven(folder) and not is_hosted(drivers(folder).path))


@pytest.mark.slow
def test_a_map_whose_drivers_are_killed_runs_each_task_once_and_is_stopped_and_gone_on_with(place: Path) -> None:
    (place / "words.py").write_text(WORDS.replace("PLACE", str(place)))
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(60)))
    folder = detach(
        place, "map", "words:slow", "--items", "items.jsonl", "--out", "out.jsonl", "--max-workers", "2", "--function-timeout-s", "40"
    )
    assert folder.events.exists(), "it is listed as begun"
    (place / "items.jsonl").unlink()
    (place / "words.py").write_text("raise RuntimeError('edited meanwhile')")
    until(lambda: (place / "ran.txt").exists() and len((place / "ran.txt").read_text().split()) >= 8)
    function = driver_function(folder.run_id)
    assert function is not None
    function.kill()
    until(lambda: len((place / "ran.txt").read_text().split()) >= 24)
    assert verbs.stop(folder.run_id) == folder.run_id
    assert status_of(folder) == "stopped"
    over(folder)
    done = len((place / "ran.txt").read_text().split())
    given(place, "resume", folder.run_id, "--detach")
    result = verbs.attach(folder.run_id)
    assert (result.summary.status, result.summary.tasks, result.summary.failed) == ("finished", 60, 0)
    assert (place / "out.jsonl").read_text() == "".join(f"{n * n}\n" for n in range(60))
    ran = Counter((place / "ran.txt").read_text().split())
    assert len(ran) == 60
    assert ran.total() <= 60 + 2 * 2 * 2, f"tasks that ran when it was stopped may run again ({done} had run): {ran.total()}"
    over(folder)
    assert not (folder.path / "objects").exists()
    row = rows()[folder.run_id]
    assert row["kind"] == "tasks"
    assert row["driving_usd"] > 0
    invoked = [e.reason for e in events_of(drivers(folder)) if isinstance(e, Invoked)]
    assert "replacement" in invoked
    assert all(e.outcome in ("finished", "") for e in events_of(drivers(folder)) if isinstance(e, Ended))


@pytest.mark.slow
def test_the_result_of_prepare_is_that_of_a_client(place: Path) -> None:
    numbers = np.random.default_rng(0)
    (place / "clicks.csv").write_text("click,a,b\n" + "".join(f"{n % 2},{numbers.random():.4f},{n % 17}\n" for n in range(3000)))
    recipe = (
        'source = "clicks.csv"\nout = "{out}"\n[label]\ncolumn = "click"\n[[steps]]\nstep = "standardise"\n[split]\ntest_fraction = 0.2\n'
    )
    (place / "here.toml").write_text(recipe.format(out="here"))
    (place / "there.toml").write_text(recipe.format(out="there"))
    given(place, "prepare", "here.toml")
    folder = detach(place, "prepare", "there.toml")
    assert verbs.attach(folder.run_id).summary.status == "finished"
    over(folder)
    files = {path.relative_to(place / "here") for path in (place / "here" / "train").rglob("*.arrow")}
    assert files
    for name in files:
        assert (place / "here" / name).read_bytes() == (place / "there" / name).read_bytes()


@pytest.mark.slow
def test_a_factorisation_goes_on_when_its_driver_is_killed(place: Path) -> None:
    a = np.random.default_rng(0).standard_normal((600, 600))
    a = a @ a.T + 600 * np.eye(600)
    np.save(place / "A.npy", a)
    folder = detach(place, "linalg", "cholesky", "A.npy", "--out", "L.npy", "--tile", "60", "--max-workers", "2")
    function = driver_function(folder.run_id)
    if function is not None:
        function.kill()
    assert verbs.attach(folder.run_id).summary.status == "finished"
    over(folder)
    lower = np.load(place / "L.npy")
    np.testing.assert_allclose(lower @ lower.T, a, rtol=1e-10)


JOB = """
model = "model:build"
loss = "cross_entropy"
optimizer = { target = "SGD", options = { lr = 0.1, momentum = 0.9 } }
epochs = 2
[data]
source = "digits"
[run]
workers = 2
batch_size = 120
memory_mb = 704
"""
MODEL = "import torch\n\ndef build():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"


@pytest.fixture
def job(place: Path) -> Path:
    (place / "model.py").write_text(MODEL)
    (place / "job.toml").write_text(JOB)
    return place / "job.toml"


@pytest.mark.slow
def test_a_training_run_has_the_weights_of_one_with_a_client(place: Path, job: Path) -> None:
    given(place, "train", "job.toml", "--json")
    here = read_summary(folders.find("last"))
    folder = detach(place, "train", "job.toml")
    result = verbs.attach(folder.run_id)
    over(folder)
    assert here is not None
    weights = json.loads((folders.all_runs()[-1].path / "result.json").read_text())["weights_sha256"]
    assert result.summary.weights_sha256 == weights


@pytest.mark.slow
def test_a_study_is_driven_with_its_trials(place: Path, job: Path) -> None:
    (place / "study.toml").write_text(
        'job = "job.toml"\nname = "rates"\nmetric = "accuracy"\nmode = "max"\nsampler = "grid"\npruner = "none"\npredict = false\n'
        "[space]\noptimizer.options.lr = [0.05, 0.1]\n"
    )
    folder = detach(place, "tune", "study.toml")
    result = verbs.attach(folder.run_id)
    assert result.summary.status == "finished"
    over(folder)
    trials = [row for row in rows().values() if row["parent"] == folder.run_id]
    assert [row["status"] for row in trials] == ["finished", "finished"]


@pytest.mark.slow
def test_a_sparse_run_goes_on_when_its_driver_is_killed_with_its_shards(place: Path) -> None:
    prepared(place / "data" / "train", rows=3000)
    prepared(place / "data" / "test", rows=600, partitions=1, seed=1)
    (place / "job.toml").write_text(
        'epochs = 4\n[sparse]\nmodel = "logistic"\nshards = 2\noptimizer = { target = "adagrad", options = { learning_rate = 0.1 } }\n'
        '[data]\nsource = "prepared"\npath = "data"\n[run]\nworkers = 2\nbatch_size = 20\nmemory_mb = 1024\n'
    )
    folder = detach(place, "train", "job.toml")
    function = driver_function(folder.run_id)
    if function is not None:
        function.kill()
    result = verbs.attach(folder.run_id)
    assert result.summary.status == "finished", result.causes
    over(folder)


@pytest.mark.slow
def test_regions_train_without_a_client(place: Path, job: Path) -> None:
    with job.open("a") as more:
        more.write(
            '[run.regions]\nexchange_every = 3\n[[run.regions.region]]\nname = "near"\nworkers = 1\n[[run.regions.region]]\nname = "far"\nworkers = 1\n'
        )
    folder = detach(place, "train", "job.toml")
    result = verbs.attach(folder.run_id)
    assert result.summary.status == "finished", result.causes
    over(folder)
    assert open_header(folder).kind == "regions"


SLOWLY = """
import time
import torch

class Slowly(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.04)
        return x

def build():
    return torch.nn.Sequential(torch.nn.Flatten(), Slowly(), torch.nn.Linear(64, 10))
"""
SIMULATED = "[simulation]\ncold_start_s = 0.5\ncompute = { a = 0.9, b = 20.0, m = 300.0 }\n"
"""Times of a step that do not depend on this machine: so the bill does not, either."""
REGIONS = """
[run.regions]
exchange_every = 3
[[run.regions.region]]
name = "near"
workers = 1
[[run.regions.region]]
name = "far"
workers = 1
"""


@pytest.fixture
def slow_job(job: Path) -> Path:
    (job.parent / "model.py").write_text(SLOWLY)
    job.write_text(job.read_text().replace("epochs = 2", "epochs = 4") + SIMULATED)
    return job


def kill_driver(folder: RunFolder) -> None:
    """Kills the function that drives a run, with SIGKILL, when a rank has made some steps."""
    until(lambda: steps(folder) >= 4 or read_summary(folder) is not None)
    function = driver_function(folder.run_id)
    assert function is not None, "the run was over before"
    function.kill()


def steps(folder: RunFolder) -> int:
    return sum(isinstance(e, Progress) for e in events_of(folder)) if folder.events.exists() else 0


def check_same(folder: RunFolder, other: RunFolder) -> None:
    """Whether two simulated runs have ended alike, and each event is there once."""
    of_both = [json.loads((each.path / "result.json").read_text()) for each in (folder, other)]
    names = ("status", "weights_sha256", "cost_usd", "billed", "seconds", "iterations", "invocations", "traffic", "metrics")
    one, two = ({name: result[name] for name in names} for result in of_both)
    assert one == two
    events = [[type(e).__name__ for e in events_of(each)] for each in (folder, other)]
    assert events[0] == events[1]
    assert events[0].count("RunStarted") == events[0].count("RunEnded") == 1
    row = rows()[folder.run_id]
    assert row["cost_usd"] == of_both[0]["cost_usd"]
    assert row["driving_usd"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "is_watched"), [("", False), ("", True), (REGIONS, False)], ids=["one place", "one place, watched", "regions"]
)
def test_a_simulated_run_whose_driver_is_killed_begins_again_and_ends_as_one_with_a_client(
    shape: str, is_watched: bool, place: Path, slow_job: Path
) -> None:
    slow_job.write_text(slow_job.read_text().replace("[simulation]", f"{shape}[simulation]"))
    given(place, "train", "job.toml", "--platform", "simulated", "--json")
    here = folders.find("last")
    folder = detach(place, "train", "job.toml", "--platform", "simulated")
    (place / "model.py").write_text("raise RuntimeError('edited meanwhile')")
    attach = [sys.executable, "-P", "-m", "ephemeron.cli.main", "attach", folder.run_id, "--json"]
    with contextlib.ExitStack() as stack:
        if is_watched:  # by a client that may drive it until a function does
            watching = stack.enter_context(subprocess.Popen(attach, cwd=place, stdout=subprocess.PIPE))
        kill_driver(folder)
        until(lambda: read_summary(folder) is not None)
        if is_watched:
            assert json.loads(watching.communicate()[0].splitlines()[-1])["status"] == "finished"
    over(folder)
    assert {e.reason for e in events_of(drivers(folder)) if isinstance(e, Invoked)} >= {"start", "replacement"}
    check_same(folder, here)
    assert not (folder.path / "simulation").exists()
    assert (folder.path / "report.html").exists()
    given(place, "report", folder.run_id)


@pytest.mark.slow
def test_a_simulated_run_is_stopped_and_begins_again(place: Path, slow_job: Path) -> None:
    folder = detach(place, "train", "job.toml", "--platform", "simulated")
    until(lambda: steps(folder) >= 4)
    with pytest.raises(UserError, match="its functions are in the process that drives it"):
        resize(folder.run_id, workers=3)
    assert verbs.stop(folder.run_id) == folder.run_id
    assert status_of(folder) == "stopped"
    over(folder)
    assert any(isinstance(e, RunEnded) and e.status == "stopped" for e in events_of(folder))
    given(place, "resume", folder.run_id, "--detach")
    assert verbs.attach(folder.run_id).summary.status == "finished"
    over(folder)
    names = [type(e).__name__ for e in events_of(folder)]
    assert (names.count("RunStarted"), names.count("RunEnded")) == (1, 1)
    assert len({(e.rank, e.iteration) for e in events_of(folder) if isinstance(e, Progress)}) == steps(folder)
    with pytest.raises(UserError, match="has finished"):
        verbs.resume(folder.run_id)


def test_a_client_shows_each_event_once_of_a_run_that_begins_again(place: Path) -> None:
    folder = folders.create("sim-1")
    kind = find_kind("tasks")
    begun = RunStarted(t=0.0, run_id="sim-1", job="", workers=1, aggregators=0, memory_mb=1, iterations=0, epochs=0, samples=0, platform="")
    events = [begun, *(Note(t=float(n), text=str(n)) for n in range(5)), RunEnded(t=9.0, status="finished", causes=[])]
    shown: list[Event] = []

    def write(some: list[Event]) -> None:
        with folder.events.open("a") as file:
            file.writelines(to_json(each) + "\n" for each in some)

    async def follow() -> RunResult | None:
        following = asyncio.ensure_future(verbs.observe(folder, kind, shown.append))
        await until_async(lambda: len(shown) == 4)
        begin_again(folder.events)
        write(events)
        await until_async(lambda: len(shown) == len(events))
        lock.close()
        return await following

    lock = hold(folder)
    write(events[:4])
    header = RunHeader(run_id="sim-1", kind="tasks", platform="simulated")
    write_summary(folder, summarized(TasksSummary, folder, header, status="finished", tasks=1, failed=0, cancelled=0))
    result = asyncio.run(asyncio.wait_for(follow(), 60))
    assert result is not None
    assert shown == events


@pytest.mark.slow
def test_a_simulated_map_begins_again_where_its_driver_is_killed_and_when_it_is_resumed(place: Path) -> None:
    (place / "words.py").write_text(WORDS.replace("PLACE", str(place)))
    (place / "items.jsonl").write_text("".join(f"{n}\n" for n in range(20)))
    command = ("map", "words:slow", "--items", "items.jsonl", "--platform", "simulated", "--max-workers", "2")
    given(place, *command, "--out", "here.jsonl")
    here = folders.find("last")
    (place / "ran.txt").unlink()
    folder = detach(place, *command, "--out", "out.jsonl")
    (place / "items.jsonl").unlink()
    (place / "words.py").write_text("raise RuntimeError('edited meanwhile')")
    until(lambda: (place / "ran.txt").exists() and len((place / "ran.txt").read_text().split()) >= 4)
    function = driver_function(folder.run_id)
    assert function is not None
    function.kill()
    before = len((place / "ran.txt").read_text().split())
    until(lambda: len((place / "ran.txt").read_text().split()) >= before + 4)
    assert verbs.stop(folder.run_id) == folder.run_id
    assert status_of(folder) == "stopped"
    over(folder)
    given(place, "resume", folder.run_id, "--detach")
    result = verbs.attach(folder.run_id)
    assert (result.summary.status, result.summary.tasks, result.summary.failed) == ("finished", 20, 0)
    assert (place / "out.jsonl").read_text() == (place / "here.jsonl").read_text()
    over(folder)
    counted = [Counter(type(e).__name__ for e in events_of(each)) for each in (folder, here)]
    assert counted[0]["Invoked"] == counted[1]["Invoked"] == result.summary.invocations, (
        "what the process before has simulated is not counted"
    )
    assert rows()[folder.run_id]["driving_usd"] > 0


@pytest.mark.slow
def test_a_simulated_study_goes_on_with_the_trial_whose_driver_was_killed(place: Path, slow_job: Path) -> None:
    text = slow_job.read_text().replace("memory_mb = 704", 'memory_mb = 704\nplatform = "simulated"')
    slow_job.write_text(text.replace("[simulation]", "[simulation]\nwarm_start_s = 0.5"))  # what goes on has no warm functions
    study = (
        'job = "job.toml"\nname = "NAME"\nmetric = "accuracy"\nmode = "max"\nsampler = "grid"\npruner = "none"\npredict = false\n'
        "concurrency = 2\n[space]\noptimizer.options.lr = [0.05, 0.1]\n"
    )
    (place / "here.toml").write_text(study.replace("NAME", "here"))
    (place / "study.toml").write_text(study.replace("NAME", "rates"))
    given(place, "tune", "here.toml")
    here = folders.find("here")
    folder = detach(place, "tune", "study.toml")
    until(lambda: len(folder.trials) == 2 and steps(folder.trials[1][1]) >= 16)
    function = driver_function(folder.run_id)
    assert function is not None
    function.kill()
    assert verbs.attach(folder.run_id).summary.status == "finished"
    over(folder)
    names = ("status", "seconds", "cost_usd", "billed", "invocations", "best", "best_value", "trials")
    one, two = ({name: json.loads((each.path / "result.json").read_text())[name] for name in names} for each in (folder, here))
    assert one == two
    trials = [row for row in rows().values() if row["parent"] == folder.run_id]
    assert [row["status"] for row in trials] == ["finished", "finished"], "what was simulated of a trial before it began again is gone"


def test_what_no_function_can_drive_is_refused_and_nothing_is_left(place: Path, job: Path) -> None:
    ran = CliRunner().invoke(main, ["train", str(job), "--channel", "parameter_server", "--detach"])
    assert ran.exit_code == 2
    assert "the parameter server is a process of the client" in " ".join(ran.output.split())
    assert folders.all_runs() == []


@pytest.mark.slow
def test_a_command_that_is_refused_when_it_is_given_again_fails_with_its_cause(place: Path) -> None:
    (place / "words.py").write_text("def same(number):\n    return number\n")
    (place / "items.jsonl").write_text("1\n2\n")
    (place / "out").mkdir()
    said = given(place, "map", "words:same", "--items", "items.jsonl", "--out", "out/o.jsonl", "--detach", "--json")
    folder = folders.find(json.loads(said.splitlines()[-1])["run_id"])
    over(folder)
    shutil.rmtree(place / "out")
    (folder.path / "result.json").unlink()
    (folder.path / "driver.lock").unlink()
    result = verbs.attach(folder.run_id, check=False)
    assert result.summary.status == "failed"
    assert "there is no folder" in result.causes[0]


def test_a_command_is_refused_as_without_it_before_anything_is_stored(place: Path) -> None:
    (place / "items.jsonl").write_text("1\n")
    ran = CliRunner().invoke(main, ["map", "nowhere:slow", "--items", "items.jsonl", "--out", "out.jsonl", "--detach"])
    assert ran.exit_code == 2
    assert "nowhere" in ran.output
    assert folders.all_runs() == []


def test_a_run_that_has_finished_or_needs_its_client_cannot_be_detached(place: Path) -> None:
    folder = folders.create("map-1")
    folder.write("run.json", {"run_id": "map-1", "kind": "tasks", "platform": "local", "ends_with_client": True})
    with pytest.raises(UserError, match="needs its client"):
        verbs.detach("map-1")
    folder.write("run.json", {"run_id": "map-1", "kind": "service", "platform": "local"})
    with pytest.raises(UserError, match="a service is a process of its command"):
        verbs.detach("map-1")


# -- driven elsewhere -----------------------------------------------------------------------------------------

LAUNCH = "abc"


def driven_elsewhere(tmp_path: Path) -> tuple[RunFolder, RunHeader]:
    """A run that functions on Lambda drive, as its client knows it."""
    folder = folders.create("a-run")
    folder.create_key()
    header = RunHeader(
        run_id="a-run",
        kind="training",
        platform="aws",
        channel=(tmp_path / "objects").as_uri(),
        functions=1,
        memory_mb=512,
        detached=LAUNCH,
    )
    write_header(folder, header)
    return folder, header


def recorded(folder: RunFolder, header: RunHeader, body: Callable[[DriverRecords, FolderCopy], Awaitable[None]]) -> None:
    async def run() -> None:
        async with open_channel(header.channel) as channel:
            launch = prefix_of(folder.run_id, LAUNCH)
            await body(DriverRecords(channel, launch, name="0-0"), FolderCopy(channel, launch, folder, folder.signing_key(), 1))

    asyncio.run(run())


def test_a_client_does_not_collect_beside_functions_that_drive_the_run(place: Path, tmp_path: Path) -> None:
    folder, header = driven_elsewhere(tmp_path)
    recorded(folder, header, lambda records, copy: records.take(1))  # type: ignore[arg-type, return-value]
    with pytest.raises(RunAlreadyDriven, match="running as functions on aws"):
        verbs.resume("a-run")
    with pytest.raises(RunAlreadyDriven, match="running as functions on aws"):
        verbs.detach("a-run")
    with pytest.raises(UserError, match="functions on aws drive run a-run"):
        asyncio.run(run_platform.attach(folder, header))
    assert open_header(folder).detached == LAUNCH


def test_a_run_that_functions_have_given_up_says_why_and_is_taken_back(place: Path, tmp_path: Path) -> None:
    folder, header = driven_elsewhere(tmp_path)
    there = folders.create("copy")
    (there.path / "events.jsonl").write_text("")
    (there.path / "logs").mkdir()
    (there.path / "logs" / "client.txt").write_text("said there\n")

    async def given_up(records: DriverRecords, copy: FolderCopy) -> None:
        copy._folder = there
        await records.create("claim/0.0")
        await copy.save()
        await records.end("its driver has ended 9 times, the last time with: no space left")

    recorded(folder, header, given_up)
    with pytest.raises(PlatformError, match=r"functions on aws have given run a-run up: its driver .* no space left"):
        verbs.attach("a-run")
    taken = detached.take_back(folder, header)
    assert (taken.detached, open_header(folder).detached) == ("", "")
    assert (folder.path / "logs" / "client.txt").read_text() == "said there\n"


def test_a_request_to_stop_reaches_the_client_that_has_taken_over(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "CLOUD_BEAT_S", 0.05)
    folder, header = driven_elsewhere(tmp_path)
    recorded(folder, header, lambda records, copy: records.create("claim/0.0"))  # type: ignore[arg-type, return-value]
    stopped: list[bool] = []
    early = iter([True, True])

    def stop(now: bool) -> None:
        if next(early, False):
            raise UserError("run a-run is not running")
        stopped.append(now)

    with detached.holding(folder, header, 1, stop):
        detached.ask_to_stop(folder, header, now=False)
        until(lambda: stopped == [False])
        detached.ask_to_stop(folder, header, now=True)
        until(lambda: stopped == [False, True])
        assert run_platform.is_driven_here("a-run")
    assert not run_platform.is_driven_here("a-run")


def test_a_request_to_stop_between_two_drivers_waits_for_the_next_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, header = driven_elsewhere(place)
    header = dataclasses.replace(header, platform="local")
    stopped: list[bool] = []
    between = iter([True, True])

    def stop(folder: RunFolder, header: RunHeader, *, now: bool) -> None:
        if next(between, False):
            raise UserError("run a-run is not running")
        stopped.append(now)

    monkeypatch.setattr(verbs, "find_kind", lambda name: SimpleNamespace(stop=stop))
    with pytest.raises(UserError, match="is not running"):
        verbs.ask_to_stop(folder, header, now=False)
    monkeypatch.setattr(detached, "has_drivers", lambda folder: True)
    verbs.ask_to_stop(folder, header, now=False)
    assert stopped == [False]


def test_another_driver_that_takes_over_from_a_client_is_a_warning(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(detached, "CLOUD_BEAT_S", 0.05)
    monkeypatch.setattr(folder_copies, "_SAVE_EVERY_S", 0.05)
    folder, header = driven_elsewhere(tmp_path)
    with detached.holding(folder, header, 1, lambda now: None):
        recorded(folder, header, lambda records, copy: records.take(2))  # type: ignore[arg-type, return-value]
        folder.events.write_text("more\n")
        until(lambda: "another driver has taken run a-run over" in caplog.text)


def test_a_driver_finds_that_its_run_is_over_where_the_one_before_died_after_the_result(place: Path, tmp_path: Path) -> None:
    folder, _ = driven_elsewhere(tmp_path)
    folder.write("result.json", {"run_id": "a-run", "status": "stopped"})
    folder.events.write_text(to_json(RunEnded(t=1.0, status="stopped")) + "\n")

    class Over:
        def attach(self, *_: object) -> None:
            raise UserError("run a-run is not running (stopped)")

        def result(self, folder: RunFolder) -> Any:
            return SimpleNamespace(summary=SimpleNamespace(status="stopped"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs, "find_kind", lambda name: Over())
        verbs.go_on("a-run")
        folder.events.write_text("")
        with pytest.raises(UserError, match="is not running"):
            verbs.go_on("a-run")


def test_the_copy_of_a_study_has_its_trials_with_derived_keys_and_a_database_that_is_whole(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def database(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("create table if not exists trials (number)")
        return connection

    def trial(number: int) -> RunFolder:
        made = folders.create(f"a-run-{number}")
        made.create_key("a-run")
        write_header(made, RunHeader(run_id=made.run_id, kind="training", platform="aws", parent="a-run"))
        (made.path / "weights.safetensors").write_bytes(b"w" * number)
        (folder.path / "trials").mkdir(exist_ok=True)
        (folder.path / "trials" / str(number)).symlink_to(made.path)
        return made

    folder, header = driven_elsewhere(tmp_path)
    trials = [trial(number) for number in range(2)]
    writer = database(folder.path / "study.db")
    writer.execute("insert into trials values (1)")
    writer.execute("begin immediate")
    writer.execute("insert into trials values (2)")  # a change that is not whole
    recorded(folder, header, lambda records, copy: copy.save())  # type: ignore[arg-type, return-value]
    key = folder.signing_key()

    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "elsewhere"))
    there = folders.create("a-run")
    create_key(there.path / "signing.key", key)
    other = folders.create("a-run-1")
    write_header(other, RunHeader(run_id="a-run-1", kind="training", platform="aws"))
    recorded(there, header, lambda records, copy: copy.restore())  # type: ignore[arg-type, return-value]
    assert [(number, found.path.resolve().name) for number, found in there.trials] == [(0, "a-run-0")], (
        "another run of this name is left alone"
    )
    assert not (other.path / "weights.safetensors").exists()
    copied = RunFolder(folders.runs_folder() / "a-run-0")
    assert copied.signing_key() == trials[0].signing_key() == key.derived("a-run-0")
    assert open_header(copied).parent == "a-run"
    assert database(there.path / "study.db").execute("select number from trials").fetchall() == [(1,)]
    stored = [path.as_posix() for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert stored
    assert not [path for path in stored if "signing.key" in path]
    write_header(there, dataclasses.replace(header, detached=LAUNCH))
    with pytest.raises(UserError, match="functions on aws drive run a-run;"):
        asyncio.run(run_platform.attach(copied, open_header(copied)))


# -- commands -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [("--items", "./items.jsonl"), ("--items=items.jsonl",), ("--items=./items.jsonl",)])
def test_a_command_that_is_given_again_reads_the_file_that_was_kept(form: tuple[str, ...]) -> None:
    launch = Launch(("map", "words:count", *form, "--out", "out.jsonl"))
    launch.keep("items.jsonl", "items.jsonl", b"1\n")
    assert launch.argv[-3] in ("program:items.jsonl", "--items=program:items.jsonl")


def test_a_run_that_is_driven_elsewhere_keeps_no_files_beyond_a_limit(place: Path) -> None:
    launch = Launch(("predict", "last", "--data", "inputs.npy", "--out", "outputs.npy"))
    launch.keep_all("last", "model", {"model/run.json": b"{}", "model/weights.safetensors": b"x" * 8})
    launch.keep("inputs.npy", "inputs.npy", b"y" * 8)
    launch.outputs["outputs.npy"] = Path("outputs.npy")
    header = RunHeader(run_id="predict-1", kind="tasks", platform="aws", channel="s3://bucket", functions=1, memory_mb=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "MOST_KEPT", 16)
        with pytest.raises(JobError, match=r"what this command reads has 18 B, and a run that is driven on aws keeps at most 16 B"):
            launch.begun(folders.create("predict-0"), header, {}, {})
    folder = folders.create("predict-1")
    found = launch.begun(folder, header, {}, {})
    assert found.payload["program"]["argv"] == [
        "predict",
        "program:model",
        "--data",
        "program:inputs.npy",
        "--out",
        "program:outputs/outputs.npy",
    ]
    assert (folder.path / "program" / "model" / "weights.safetensors").read_bytes() == b"x" * 8
    program = programs.program_of(found)
    assert program is not None
    (folder.path / "program" / "outputs" / "outputs.npy").mkdir(parents=True)
    (folder.path / "program" / "outputs" / "outputs.npy" / "a").write_text("a folder of results")
    with run_platform.driven_here("predict-1", is_copied=True):
        programs.bring_outputs(folder, program)
    assert not (place / "outputs.npy").exists(), "a function writes nothing outside of its copy"
    programs.bring_outputs(folder, program)
    assert (place / "outputs.npy" / "a").read_text() == "a folder of results"


def test_a_header_has_no_password_of_an_option_with_an_equals_sign(place: Path) -> None:
    folder = folders.create("map-1")
    launch = Launch(("map", "words:count", "--channel=redis://me:secret@localhost:1/0", "--channel", "redis://me:secret@localhost:1/0"))
    header = RunHeader(run_id="map-1", kind="tasks", platform="local", channel="redis://localhost:1/0", functions=1, memory_mb=512)
    found = launch.begun(folder, header, {}, {})
    assert "secret" not in json.dumps(plain(found))
    assert found.payload["program"]["argv"][2] == "--channel=redis://localhost:1/0"
    with pytest.raises(JobError, match="cannot be detached"):
        launch.begun(folders.create("map-2"), dataclasses.replace(header, run_id="map-2", channel="ps://1"), {}, {})
    assert not (folders.runs_folder() / "map-2" / "program").exists()


def test_a_study_that_cannot_be_detached_stores_nothing(place: Path, job: Path) -> None:
    (place / "study.toml").write_text(
        'job = "job.toml"\nname = "rates"\nmetric = "accuracy"\nmode = "max"\nsampler = "grid"\npruner = "none"\npredict = false\n'
        "[space]\noptimizer.options.lr = [0.05, 0.1]\n"
    )
    with job.open("a") as more:
        more.write('channel = "parameter_server"\n')
    ran = CliRunner().invoke(main, ["tune", "study.toml", "--detach"])
    assert ran.exit_code == 2, ran.output
    assert "the parameter server is a process of the client" in " ".join(ran.output.split())
    assert not (place / "rates").exists()
    assert folders.all_runs() == []


def test_a_study_whose_job_reads_other_files_of_this_machine_is_not_driven_elsewhere(place: Path, job: Path) -> None:
    (place / "study.toml").write_text('job = "job.toml"\nsampler = "grid"\npredict = false\n[space]\noptimizer.options.lr = [0.05, 0.1]\n')
    (place / "first.safetensors").write_bytes(b"")
    text = job.read_text().replace("[run]\n", '[run]\nplatform = "aws"\nchannel = "s3://bucket/prefix"\n')
    job.write_text(f'init = "first.safetensors"\n{text}')
    ran = CliRunner().invoke(main, ["tune", "study.toml", "--detach"])
    assert ran.exit_code == 2, ran.output
    assert "job.toml: init = " in " ".join(ran.output.split())
    assert "is on this machine, and the study would be driven on aws" in " ".join(ran.output.split())
    assert folders.all_runs() == []
