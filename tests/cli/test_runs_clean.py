"""`ephemeron runs clean`, and how runs on clouds are listed: what is there, from files alone."""

from __future__ import annotations

import asyncio
import fcntl
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from ephemeron.cli.main import main
from ephemeron.communication.channels import open_channel
from ephemeron.events import Note, RunEnded, RunStarted, to_json
from ephemeron.functions.daemon_messages import LOCK_FILE
from ephemeron.runs import folders as homes
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.status import session_end, status_of

if TYPE_CHECKING:
    pass


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


def started(run: str) -> str:
    return to_json(RunStarted(t=0.0, run_id=run, job="j", workers=1, aggregators=1, memory_mb=1, iterations=1, epochs=1, samples=1))


def ended(status: Any) -> str:
    return to_json(RunEnded(t=1.0, status=status))


def made(run: str, address: str, *, platform: str = "local", status: str = "finished", events: str = "") -> RunFolder:
    """A run's folder as a run leaves it."""
    folder = homes.create(run)
    folder.write("run.json", {"run_id": run, "platform": platform, "address": address})
    if status:
        folder.write("result.json", {"status": status})
    if events:
        folder.events.write_text(events)
    return folder


def put(address: str, **sizes: int) -> None:
    async def go() -> None:
        async with open_channel(address) as channel:
            for key, nbytes in sizes.items():
                await channel.put(key, [bytes(nbytes)])

    asyncio.run(go())


def left(address: str) -> list[str]:
    async def go() -> list[str]:
        async with open_channel(address) as channel:
            return await channel.list("")

    return asyncio.run(go())


def clean(*arguments: str, say: str = "y\n") -> Result:
    return CliRunner().invoke(main, ["runs", "clean", *arguments], input=say)


@pytest.fixture(params=["folder", "cache", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return (tmp_path / "objects").as_uri()
    if request.param == "cache":
        return str(request.getfixturevalue("valkey_server").address)[:-1] + "7"
    return str(request.getfixturevalue("s3")) + "/cleaning"


def test_a_run_s_objects_are_listed_with_sizes_and_deleted_when_said_so(address: str) -> None:
    put(address, **{"a-1/spec": 10, "a-1/result": 30_000, "a-1.calls/cancel": 5, "a-10/spec": 7, "theirs": 1})
    made("a-1", address, platform="aws", events=started("a-1") + "\n" + ended("finished") + "\n")
    made("a-10", address)
    kept = clean("a-1", say="n\n")
    assert kept.exit_code == 1
    assert len(left(address)) == 5, "nobody said yes"
    done = clean("a-1")
    assert done.exit_code == 0, done.output
    assert "deleted 3 objects (3" in done.output, "30.0 kB in a store, a little more in a cache"
    assert "could still be resumed" not in done.output
    assert left(address) == ["a-10/spec", "theirs"], "nothing of another run, nothing of others"
    assert homes.find("a-1").read("result.json") == {"status": "finished"}, "the folder stays"
    assert "nothing is left in the channels of 1 run" in clean("a-1").output
    asyncio.run(_forget(address))


async def _forget(address: str) -> None:
    async with open_channel(address) as channel:
        await channel.delete(await channel.list(""))


def test_folders_go_when_they_are_meant_and_resuming_is_mentioned(tmp_path: Path) -> None:
    address = (tmp_path / "objects").as_uri()
    put(address, **{"b-1/state": 10})
    folder = made("b-1", address, status="stopped")
    done = clean("b-1", "--folder", "--yes", say="")
    assert done.exit_code == 0, done.output
    assert "1 run of these could still be resumed, and no longer afterwards" in done.output
    assert not folder.path.exists()
    assert left(address) == []


def test_objects_in_the_run_s_own_folder(tmp_path: Path) -> None:
    folder = homes.create("c-1")
    folder.write("run.json", {"run_id": "c-1", "platform": "local", "address": folder.objects.as_uri()})
    put(folder.objects.as_uri(), **{"c-1/spec": 3})
    assert "deleted 1 object (3 B)" in clean("--all").output
    made("simulated", "", platform="simulated")
    made("served", "ps://127.0.0.1:9", platform="local")
    assert "nothing is left in the channels of 3 runs" in clean("--all").output


def test_what_runs_is_refused_and_left_out_of_all(tmp_path: Path) -> None:
    address = (tmp_path / "objects").as_uri()
    put(address, **{"d-1/spec": 3, "d-2/spec": 3})
    living, _ = made("d-1", address, status="stopped"), made("d-2", address)
    with (living.path / LOCK_FILE).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = clean("d-1")
        assert (refused.exit_code, "run d-1 is running; first: ephemeron stop d-1" in refused.output) == (2, True)
        assert clean("--all").exit_code == 0
    assert left(address) == ["d-1/spec"]
    assert clean("d-1").exit_code == 0


def test_a_run_on_a_cloud_that_nobody_saw_end_is_refused_unless_forced(tmp_path: Path) -> None:
    address = (tmp_path / "objects").as_uri()
    put(address, **{"e-1/spec": 3})
    made("e-1", address, platform="aws", status="", events=started("e-1") + "\n")
    refused = clean("e-1")
    assert refused.exit_code == 2
    assert "run e-1 may still be running (on aws); find out with: ephemeron attach e-1" in refused.output
    assert "nothing is left" in clean("--all").output
    assert clean("e-1", "--force").exit_code == 0
    assert left(address) == []


def test_a_channel_that_is_gone_is_said_and_the_folder_stays(tmp_path: Path, own_valkey: Any) -> None:
    folder = made("f-1", "redis://127.0.0.1:9/0")
    done = clean("f-1", "--folder")
    assert done.exit_code == 1
    assert "not deleted: f-1: redis://127.0.0.1:9/0: cannot connect" in done.output
    assert folder.path.exists()


def test_it_wants_to_know_which(tmp_path: Path) -> None:
    for arguments in ([], ["--all", "x"]):
        assert "say which runs: RUN..., or --all" in clean(*arguments).output


# -- how runs stand -------------------------------------------------------------------------------------------


def test_runs_on_clouds_are_listed_by_what_their_events_say(tmp_path: Path) -> None:
    filler = "".join(to_json(Note(t=1.0, text="x" * 100)) + "\n" for _ in range(2000))
    stories = {
        "on aws": started("r") + "\n" + filler,
        "finished": started("r") + "\n" + filler + ended("finished") + "\n",
        "stopped": started("r") + "\n" + ended("failed") + "\n" + started("r") + "\n" + ended("stopped") + "\n",
        "interrupted": "",
    }
    for n, (status, events) in enumerate(stories.items()):
        folder = made(f"run-{n}", "s3://none/at-all", platform="aws", status="", events=events)
        assert status_of(folder) == status
    resumed = made(
        "resumed",
        "s3://none/x",
        platform="ray",
        status="stopped",
        events=started("r") + "\n" + ended("stopped") + "\n" + started("r") + "\n" + filler,
    )
    assert status_of(resumed) == "on ray", "an earlier session's result is not this one's"
    ran = CliRunner().invoke(main, ["runs", "--json"])
    found = {row["run_id"]: row["status"] for row in map(json.loads, ran.stdout.splitlines())}
    assert found == {**{f"run-{n}": status for n, status in enumerate(stories)}, "resumed": "on ray"}
    with (resumed.path / "collector.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert status_of(resumed) == "running", "a process of this machine watches it"


@pytest.mark.parametrize(
    ("text", "end"),
    [("", None), ("torn {\n", None), (started("r") + "\n" + ended("failed"), "failed"), (ended("failed") + "\n" + '{"kind":"run_en', None)],
)
def test_the_end_of_a_session(text: str, end: str | None, tmp_path: Path) -> None:
    assert session_end(tmp_path / "none") is None
    (tmp_path / "events").write_text(text)
    assert session_end(tmp_path / "events") == end
