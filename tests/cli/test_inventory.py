"""`runs clean --dry-run` and `--all`: everything that there is, who uses it, and what goes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.object_store import ObjectsChannel
from ephemeron.errors import ChannelUnreachable
from ephemeron.executor import FunctionExecutor
from ephemeron.runs import folders
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.runs.lock import driving

OLD = 7_200


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EPHEMERON_DATASETS_STORE", raising=False)
    return tmp_path / "home"


def file(path: Path, nbytes: int, *, age_s: float = OLD, head: bytes = b"") -> Path:
    """A file, and its folders, which have not changed for a while."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.ljust(nbytes, b"\0"))
    for each in (path, path.parent):
        os.utime(each, (time.time() - age_s,) * 2)
    return path


def clean(*arguments):
    return CliRunner().invoke(main, ["runs", "clean", *arguments])


def listed(*arguments):
    ran = clean("--dry-run", "--json", *arguments)
    assert ran.exit_code == 0, ran.output
    items = [json.loads(line) for line in ran.stdout.splitlines()]
    return {(item["kind"], item["name"]): item for item in items}


@pytest.fixture
def full(home):
    """A home folder with something of every kind."""
    run = folders.create("mine")
    run.write("run.json", {"run_id": "mine", "platform": "local", "address": run.objects.resolve().as_uri()})
    run.write("result.json", {"status": "finished"})
    run.write("job.json", {"code": [str(home / "programs" / "used")]})
    file(home / "programs" / "studied" / "a.py", 10)
    file(home / "studies" / "s" / "study.toml", 250, head=str(home / "programs" / "studied").encode())
    for path, nbytes in {
        "programs/used/a.py": 10,
        "programs/unused/a.py": 20,
        "sessions/aa/log": 30,
        "profiling/p-1/log": 40,
        "studies/s/study.db": 50,
        "profiles/p.json": 60,
        "platforms/local.json": 70,
        "policies/x.json": 80,
        "data-service/settings.json": 90,
        "tasks/dead/log": 100,
        "matrices/unnamed-0123456789abcdef/t": 110,
        "matrices/mine/t": 120,
        "datasets-store/d/f": 130,
        "mine/notes": 140,
    }.items():
        file(home / path, nbytes)
    return home


def test_everything_is_listed_with_its_size_and_owner(full):
    found = listed()
    sizes = {(kind, name): item["nbytes"] for (kind, name), item in found.items() if kind not in ("run", "matrix", "matrix-owners")}
    assert sizes == {
        ("executor", "dead"): 100,
        ("session", "aa"): 30,
        ("profile run", "p-1"): 40,
        ("program", "used"): 10,
        ("program", "unused"): 20,
        ("program", "studied"): 10,
        ("study", "s"): 300,
        ("profiles", ""): 60,
        ("platforms", ""): 70,
        ("policies", ""): 80,
        ("data-service", ""): 90,
        ("datasets-store", ""): 130,
        ("mine", ""): 140,
    }
    assert found["run", "mine"]["owner"] == "nobody, it is finished"
    assert found["program", "used"]["owner"] == "run mine"
    assert found["program", "studied"]["owner"] == "study s"
    assert found["matrix", "mine"]["kept"] == "named"
    total = sum(p.stat().st_size for p in full.rglob("*") if p.is_file())
    assert sum(item["nbytes"] for item in found.values()) == total
    assert {key for key, item in found.items() if not item["kept"]} >= {
        ("executor", "dead"),
        ("session", "aa"),
        ("profile run", "p-1"),
        ("program", "unused"),
    }
    shown = clean("--dry-run")
    assert shown.exit_code == 0
    assert "`ephemeron runs clean --all` removes" in shown.output
    assert "not known" in shown.output, "mine is no folder of ephemeron's"


def test_what_nobody_uses_goes_and_results_stay(full):
    before = {str(p.relative_to(full)) for p in full.rglob("*") if p.is_file()}
    done = clean("--all", "--yes")
    assert done.exit_code == 0, done.output
    gone = before - {str(p.relative_to(full)) for p in full.rglob("*") if p.is_file()}
    matrices = {name for name in gone if name.startswith("matrices/")}
    assert gone - matrices == {"programs/unused/a.py", "sessions/aa/log", "profiling/p-1/log", "tasks/dead/log"}
    assert "matrices/mine/t" not in gone
    assert "nothing is left in the channels of 1 run" in clean("--all", "--yes").output


def test_what_is_used_or_new_stays(home):
    with FunctionExecutor("simulated", max_workers=1) as pool:
        assert pool.submit(abs, -1).result(60) == 1
        os.utime(pool.folder, (0, 0))
        file(home / "programs" / "new" / "a.py", 1, age_s=0)
        file(home / "profiling" / "long" / "logs" / "a", 1, age_s=0)
        os.utime(home / "profiling" / "long", (0, 0))
        with FunctionExecutor("simulated", max_workers=1) as waiting:
            found = listed()
            assert found["run", pool.folder.name]["owner"] == "its process"
            assert ("run", waiting.folder.name) not in found, "it has no task yet"
            assert found["profile run", "long"]["kept"] == "it is new, or in use"
            assert found["program", "new"]["kept"] == "it is new, or in use"
            assert clean("--all", "--yes").exit_code == 0
            assert waiting.submit(abs, -3).result(60) == 3
        assert pool.folder.is_dir()
        assert pool.submit(abs, -2).result(60) == 2
    assert listed()["run", pool.folder.name]["owner"] == "nobody, it is finished"


def test_a_store_is_listed_by_what_its_objects_belong_to(home, tmp_path):
    address = (tmp_path / "store").as_uri()

    async def put():
        async with open_channel(address) as channel:
            for key, nbytes in {"mine/spec": 10, "mine.calls/a": 5, "map-0101-010203-abcd.work/b": 7, "theirs/x": 3}.items():
                await channel.put(key, [bytes(nbytes)])

    asyncio.run(put())
    run = folders.create("mine")
    run.write("run.json", {"run_id": "mine", "platform": "local", "address": address})
    run.write("result.json", {"status": "stopped"})
    staged = file(tmp_path / "store" / "theirs" / "y#1", 9, head=b"EPHMSIG1")
    young = file(tmp_path / "store" / "theirs" / "z#1", 9, age_s=0, head=b"EPHM")
    users = file(tmp_path / "store" / "notes" / "task#12", 9, head=b"text")
    found = listed("--store", address)
    assert found["run", "mine"]["objects"] == 2
    assert found["run", "map-0101-010203-abcd"]["owner"] == "not known here"
    assert found["staging", "*#N"]["nbytes"] == 9
    done = clean("--all", "--store", address, "--yes")
    assert done.exit_code == 0, done.output
    assert not staged.exists()
    assert young.exists()
    assert users.exists(), "a file of the user's that is called so"
    left = {p.name for p in (tmp_path / "store").rglob("*") if p.is_file()}
    assert left >= {"x", "b"}, "of others"
    assert "spec" not in left, "of the run"


def test_files_that_vanish_while_they_are_counted(full, monkeypatch):
    file(full / "sessions" / "aa" / "gone", 5)
    lstat = Path.lstat

    def racing(path):
        if path.name == "gone":
            raise FileNotFoundError(path)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", racing)
    assert listed()["session", "aa"]["nbytes"] == 30


def test_an_executor_whose_channel_fails_when_it_is_cleaned_keeps_the_address_of_its_objects(home, tmp_path, monkeypatch):
    address = (tmp_path / "store").as_uri()
    folder = folders.create("map-0101-010203-abcd")
    folder.write("run.json", {"run_id": folder.run_id, "kind": "tasks", "platform": "local", "channel": address, "ends_with_client": True})
    (folder.path / "driver.lock").touch()

    async def put():
        async with open_channel(address) as channel:
            await channel.put("map-0101-010203-abcd.work/b", [b"1"])

    asyncio.run(put())

    async def fails(self, keys):
        raise ChannelUnreachable("no answer", key="")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectsChannel, "delete", fails)
        done = clean("--all", "--yes")
        assert done.exit_code == 1
        assert "not deleted: map-0101-010203-abcd: no answer" in done.output
    found = listed()["run", folder.run_id]
    assert (found["objects"], address in found["kept"]) == (1, True)
    done = clean("--all", "--yes")
    assert done.exit_code == 0, done.output
    assert "could still be resumed" not in done.output
    assert listed()["run", folder.run_id]["objects"] == 0


def test_what_is_used_again_before_the_answer_stays(full, monkeypatch):
    def answered(*arguments, **more):
        os.utime(full / "sessions" / "aa" / "log")
        return True

    monkeypatch.setattr("click.confirm", answered)
    done = clean("--all")
    assert "session aa: it is new, or in use" in done.output
    assert (full / "sessions" / "aa" / "log").exists()
    assert not (full / "profiling" / "p-1").exists()


def test_a_dry_run_of_a_run_deletes_nothing(home, tmp_path):
    run = folders.create("mine")
    run.write("run.json", {"run_id": "mine", "platform": "local", "address": run.objects.resolve().as_uri()})
    run.write("result.json", {"status": "stopped"})
    file(run.objects / "mine" / "spec", 12)
    said = clean("mine", "--dry-run", "--json")
    assert json.loads(said.stdout) | {"folder_bytes": 0} == {
        "run": "mine",
        "status": "stopped",
        "channel": run.objects.resolve().as_uri(),
        "objects": 1,
        "nbytes": 12,
        "folder_bytes": 0,
        "problem": "",
    }
    assert "mine" in clean("mine", "--dry-run").output
    assert (run.objects / "mine" / "spec").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "say which runs: RUN..., or --all"), (("--all", "--json"), "--json is for --dry-run"), (("x", "--store", "s"), "--store is for")],
)
def test_wrong_options(home, arguments, said):
    ran = clean(*arguments)
    assert ran.exit_code == 2
    assert said in ran.output


def test_matrices_of_this_process_are_its_own(home):
    pytest.importorskip("scipy", reason="matrices need SciPy")
    from ephemeron.linalg import BigMatrix

    matrix = BigMatrix.from_numpy(np.eye(4), tile=4)
    (item,) = (item for (kind, _), item in listed().items() if kind == "matrix")
    assert item["owner"] == f"process {os.getpid()}"
    assert item["kept"] == "it is in use"
    np.testing.assert_array_equal(matrix.to_numpy(), np.eye(4))


def test_a_service_runs_as_long_as_its_process(home):
    """It was said to be kept by its functions, of which most services have none."""
    folder = folders.create(folders.new_run_id("rendezvous"))
    header = RunHeader(run_id=folder.run_id, kind="service", name="rendezvous", platform="local")
    write_header(folder, header)
    with driving(folder):
        assert listed()["run", folder.run_id]["owner"] == "its process"
    assert listed()["run", folder.run_id]["owner"] == "nobody, it is interrupted"
