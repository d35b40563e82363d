"""The home folder: runs are found by name, by beginning, or as the last one."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from ephemeron.config.paths import replace_file
from ephemeron.errors import JobError, RunNotFound
from ephemeron.runs import folders as homes


def make(run_id, *, age=0):
    folder = homes.create(run_id)
    folder.write("run.json", {"run_id": run_id})
    os.utime(folder.path / "run.json", (1e9 - age, 1e9 - age))
    return folder


def test_home_is_where_the_environment_says_else_in_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "x"))
    assert homes.home() == tmp_path / "x"
    monkeypatch.setenv("EPHEMERON_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert homes.home() == tmp_path / ".ephemeron"


@pytest.mark.parametrize("job", ["digits", "Größe 8 × 8", "../../etc/passwd", "a/b", "", "---", "x" * 100, "日本", "a\nb"])
def test_names_of_runs_are_fit_for_keys_and_folders(job):
    name = homes.new_run_id(job)
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]*-\d{4}-\d{6}-[0-9a-f]{4}", name)
    assert len(name) <= 24 + 17
    assert len({homes.new_run_id(job) for _ in range(5)}) > 1


def test_a_run_is_found_by_its_name_or_an_unambiguous_beginning(home):
    make("digits-1")
    make("digits-10")
    make("other-1")
    assert homes.find("digits-10").run_id == "digits-10"
    assert homes.find("digits-1").run_id == "digits-1", "a whole name is not the beginning of another"
    assert homes.find("oth").run_id == "other-1"


def test_an_ambiguous_beginning_names_its_runs(home):
    make("digits-1")
    make("digits-2")
    make("other-1")
    with pytest.raises(RunNotFound) as caught:
        homes.find("dig")
    assert "is ambiguous" in str(caught.value)
    assert "digits-1" in str(caught.value)
    assert "digits-2" in str(caught.value)
    assert "other-1" not in str(caught.value)


def test_an_unknown_run_says_where_it_looked_and_what_there_is(home):
    make("digits-1")
    with pytest.raises(RunNotFound) as caught:
        homes.find("digitz")
    assert str(home / "runs") in str(caught.value)
    assert "digits-1" in str(caught.value)


@pytest.mark.parametrize("name", ["last", "x", ""])
def test_no_runs_yet(home, name):
    assert homes.all_runs() == []
    with pytest.raises(RunNotFound, match="none yet"):
        homes.find(name)


def test_the_newest_comes_first_and_is_the_last(home):
    make("b", age=10)
    make("a", age=5)
    make("c", age=20)
    assert [r.run_id for r in homes.all_runs()] == ["a", "b", "c"]
    assert homes.find("last").run_id == "a"


def test_folders_without_a_record_are_no_runs(home):
    make("a")
    homes.create("half-made")
    (home / "runs/file").touch()
    assert [r.run_id for r in homes.all_runs()] == ["a"]


def test_two_runs_never_share_a_folder(home):
    make("a")
    with pytest.raises(JobError, match=r"cannot make .*set EPHEMERON_HOME"):
        homes.create("a")


def test_a_home_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "file"))
    with pytest.raises(JobError, match="set EPHEMERON_HOME to a folder you can write"):
        homes.create("a")
    assert homes.all_runs() == []


def test_files_are_replaced_as_a_whole_and_leave_nothing_beside(home):
    folder = make("a")
    folder.write("result.json", {"x": 1, "y": "ü"})
    folder.write("result.json", {"x": 2})
    assert folder.read("result.json") == {"x": 2}
    assert sorted(p.name for p in folder.path.iterdir()) == ["result.json", "run.json"]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b"null", b"\xff"])
def test_a_file_that_is_absent_or_damaged_reads_as_none(home, content):
    folder = make("a")
    if content is not None:
        (folder.path / "result.json").write_bytes(content)
    assert folder.read("result.json") is None


@pytest.mark.parametrize("first", [True, False], ids=["before it is looked at", "afterwards"])
def test_a_run_may_be_removed_while_runs_are_listed(first, home, monkeypatch):
    make("kept")
    gone = make("gone").path
    status = Path.stat

    def removing(path, **options):
        if path != gone / "run.json":
            return status(path, **options)
        if first:
            shutil.rmtree(gone, ignore_errors=True)
        found = status(path, **options)
        shutil.rmtree(gone)
        return found

    monkeypatch.setattr(Path, "stat", removing)
    assert {"kept"} <= {run.run_id for run in homes.all_runs()} <= ({"kept"} if first else {"kept", "gone"})
    assert not os.path.lexists(gone)


def test_two_that_replace_a_file_at_once_both_succeed_and_it_is_whole(tmp_path, monkeypatch):
    file, replace = tmp_path / "profile.json", Path.replace

    def another_comes_first(part, target):
        monkeypatch.undo()
        replace_file(file, "of the other")
        assert file.read_text() == "of the other"
        return replace(part, target)

    monkeypatch.setattr(Path, "replace", another_comes_first)
    replace_file(file, "of this one")
    assert file.read_text() == "of this one"
    assert list(tmp_path.iterdir()) == [file]
