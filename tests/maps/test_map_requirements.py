"""`--requirements`, and files of requirements beside a function: packages of a folder that functions have, and their client has not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.executor.wheels import make_wheel

import ephemeron
from ephemeron.cli.main import main
from ephemeron.config import own_processes
from ephemeron.errors import JobError, TaskFailed
from ephemeron.functions.environments.requirement_files import read_requirements
from ephemeron.runs.verbs import attach

pytest.importorskip("pip", reason="requirements are installed with pip")
pytest.importorskip("pyarrow", reason="results are kept as Parquet")

MODULE = """
import doubling_by_hand

def twice(x):
    return doubling_by_hand.twice(x)
"""
IN_THE_CALL = """
def twice(x):
    import doubling_by_hand
    return doubling_by_hand.twice(x)

def pictures(x):
    import cv2

def numbers(x):
    import numpy
    return numpy.__version__
"""
OPTIONS = "--no-index\n--find-links wheels\n"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    make_wheel(tmp_path / "wheels", "doubling_by_hand", "1.0", "def twice(x):\n    return 2 * x\n", ["numpy"])
    make_wheel(tmp_path / "wheels", "numpy", "0.9", "")
    make_wheel(tmp_path / "wheels", "numpy", "99.0", "")
    (tmp_path / "at_the_top.py").write_text(MODULE)
    (tmp_path / "in_the_call.py").write_text(IN_THE_CALL)
    (tmp_path / "items.jsonl").write_text("1\n2\n3\n")
    yield tmp_path
    for name in ("at_the_top", "in_the_call", "doubling_by_hand"):
        sys.modules.pop(name, None)


def invoke(function, *arguments, platform="local"):
    where = ["--platform", platform, "--max-workers", "1"]
    return CliRunner().invoke(main, ["map", function, "--items", "items.jsonl", "--out", "out.jsonl", *where, *arguments])


def environments(here):
    return [path for path in (here / "home" / "environments").iterdir() if path.is_dir()]


def test_functions_have_what_a_file_names_and_it_is_installed_once(here):
    (here / "needed.txt").write_text(f"{OPTIONS}doubling_by_hand>=1  # a comment\n")
    ran = invoke("at_the_top:twice", "--requirements", "needed.txt", "--json")
    assert ran.exit_code == 0, ran.output
    assert (here / "out.jsonl").read_text() == "2\n4\n6\n"
    assert "installing 1 requirement of needed.txt, once" in ran.stderr
    again = invoke("at_the_top:twice", "--requirements", "needed.txt", "--json")
    assert json.loads(again.stdout)["computed"] == 0
    assert "installing" not in again.stderr
    [folder] = environments(here)
    assert not list(folder.glob("lib/*/site-packages/numpy*")), "what is installed here is not installed again"
    said = CliRunner().invoke(main, ["runs", "clean", "--dry-run", "--json"])
    found = [item for item in map(json.loads, said.output.splitlines()) if item["kind"] == "environment"]
    assert [(item["name"], item["kept"]) for item in found] == [(folder.name, "it was used within the hour")]
    os.utime(folder / "complete", (0, 0))
    assert CliRunner().invoke(main, ["runs", "clean", "--all", "--yes"]).exit_code == 0
    assert environments(here) == []


@pytest.mark.slow
def test_other_requirements_are_another_version_of_the_function(here):
    (here / "needed.txt").write_text(f"{OPTIONS}doubling_by_hand>=1\n")
    (here / "others.txt").write_text(f"# of another day\n--no-index\n-f {here / 'wheels'}\ndoubling_by_hand>=1\n")
    (here / "later.txt").write_text(f"{OPTIONS}doubling_by_hand==1.0\n")
    counts = []
    for options in (
        ["needed.txt"],
        ["others.txt"],
        ["later.txt"],
        ["later.txt", "--code-version", "v1"],
        ["needed.txt", "--code-version", "v1"],
    ):
        ran = invoke("in_the_call:twice", "--json", "--requirements", *options, platform="simulated")
        assert ran.exit_code == 0, ran.output
        counts.append(json.loads(ran.stdout)["computed"])
    assert counts == [3, 0, 3, 3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["requirements.txt", "pyproject.toml", "pylock.toml"])
def test_a_file_beside_the_function_is_used_if_something_is_missing(here, monkeypatch, name):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(here / "wheels"))
    texts = {
        "requirements.txt": "doubling_by_hand\n",
        "pyproject.toml": '[project]\nname = "mine"\ndependencies = ["doubling_by_hand>=1"]\n',
        "pylock.toml": '[[packages]]\nname = "doubling_by_hand"\nversion = "1.0"\nwheels = [{ name = "x.whl" }]\n',
    }
    (here / name).write_text(texts[name])
    ran = invoke("at_the_top:twice", platform="simulated")
    assert ran.exit_code == 0, ran.output
    assert f"doubling_by_hand is not installed here: functions get what {here / name} names" in ran.stderr
    assert (here / "out.jsonl").read_text() == "2\n4\n6\n"


def test_a_file_beside_the_function_is_left_alone_if_nothing_is_missing(here):
    (here / "requirements.txt").write_text("nothing-that-there-is\n")
    (here / "whole.py").write_text("def f(x):\n    try:\n        import nothing_that_there_is\n    except ImportError:\n        return x\n")
    ran = invoke("whole:f", platform="simulated")
    assert ran.exit_code == 0, ran.output
    assert not (here / "home" / "environments").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(
            "nothing-there-is\n", "cannot be installed: No matching distribution found for nothing-there-is", marks=pytest.mark.slow
        ),
        pytest.param("doubling_by_hand\nnumpy==0.9\n", "numpy==0.9, (constraint) numpy>=1.26", marks=pytest.mark.slow),
        pytest.param(
            "doubling_by_hand\nnumpy==99.0\n",
            "do not go with ephemeron: ModuleNotFoundError: No module named 'numpy.random'",
            marks=pytest.mark.slow,
        ),
        ("-r nested.txt\n", "requirements nested.txt cannot be read: No such file or directory"),
        ("./absent.whl\n", "requirements needed.txt, line 3: there is no ./absent.whl"),
        ("# nothing\n", "requirements needed.txt name no package; write a line for each"),
        (None, "requirements needed.txt cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_installed_is_refused_in_one_line(here, text, why):
    if text is not None:
        (here / "needed.txt").write_text(OPTIONS + text)
    ran = invoke("in_the_call:twice", "--requirements", "needed.txt")
    assert ran.exit_code == 2, ran.output
    [line] = [line for line in ran.stderr.splitlines() if not line.startswith("installing")]
    assert why in line
    assert not (here / "home" / "runs").exists(), "nothing was started"
    assert not (here / "home" / "environments").exists() or environments(here) == [], "nothing is left of it"


def test_a_home_that_cannot_be_written_is_named(here, monkeypatch):
    (here / "needed.txt").write_text(f"{OPTIONS}doubling_by_hand\n")
    (here / "file").touch()
    monkeypatch.setenv("EPHEMERON_HOME", str(here / "file"))
    with pytest.raises(JobError, match=r"needed\.txt cannot be installed below .*; set EPHEMERON_HOME"):
        ephemeron.FunctionExecutor(requirements="needed.txt")


@pytest.mark.slow
def test_an_executor_has_requirements_and_names_a_missing_module(here):
    (here / "needed.txt").write_text(f"{OPTIONS}doubling_by_hand\n")
    with ephemeron.FunctionExecutor(requirements="needed.txt", max_workers=1, retries=0, progress=False) as pool:
        assert pool.submit("in_the_call:twice", 4).result(60) == 8
        with pytest.raises(
            TaskFailed, match="No module named 'cv2'; put opencv-python-headless into a file of requirements, and give --requirements FILE"
        ):
            pool.submit("in_the_call:pictures", 4).result(60)


def test_a_module_that_is_missing_at_the_import_is_named_with_its_requirement(here):
    ran = invoke("at_the_top:twice", platform="simulated")
    assert "put doubling-by-hand into a file of requirements, and give --requirements FILE" in ran.stderr


def test_a_deployment_that_lacks_requirements_is_refused(here):
    from ephemeron.functions.base import Limits
    from ephemeron.functions.deployed_packages import check_requirements

    with pytest.raises(
        JobError, match=r"needed\.txt names doubling-by-hand, .* run: ephemeron cloud deploy aws … --requirements needed\.txt"
    ):
        check_requirements("needed.txt", ["doubling_by_hand>=1", "numpy"], Limits(packages=frozenset()), "aws")
    check_requirements("needed.txt", ["doubling_by_hand>=1"], Limits(packages=frozenset({"doubling-by-hand"})), "aws")
    check_requirements("needed.txt", ["doubling_by_hand>=1"], Limits(), "aws")
    with pytest.raises(JobError, match="functions on ray have the packages of the machines on which they run"):
        check_requirements("needed.txt", ["doubling_by_hand>=1"], Limits(), "ray")


def test_files_that_a_file_names_are_part_of_it(here):
    (here / "more").mkdir()
    (here / "more" / "nested.txt").write_text("scipy>=1.11; python_version > '3'\n--extra-index-url https://x.example\n")
    (here / "limits.txt").write_text("numpy<3\n")
    (here / "needed.txt").write_text("-r more/nested.txt\n-c limits.txt\npandas \\\n  >=2\n-e wheels/../wheels\n")
    found = read_requirements("needed.txt")
    assert [" ".join(line.split()) for line in found.lines] == [
        "scipy>=1.11; python_version > '3'",
        "pandas >=2",
        str((here / "wheels").resolve()),
    ]
    assert found.options == ("--extra-index-url https://x.example",)
    assert found.constraints == ("numpy<3",)


@pytest.mark.slow
@pytest.mark.cold_start
def test_functions_that_drive_a_map_have_what_was_found_beside_it(here):
    (here / "requirements.txt").write_text(f"{OPTIONS}-c limits.txt\ndoubling_by_hand\n")
    (here / "limits.txt").write_text("doubling_by_hand<2\n")
    ran = CliRunner().invoke(
        main, ["map", "at_the_top:twice", "--items", "items.jsonl", "--out", "out.jsonl", "--max-workers", "1", "--detach", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    for name in ("requirements.txt", "limits.txt", "at_the_top.py", "items.jsonl"):
        (here / name).unlink()
    assert attach(json.loads(ran.stdout.splitlines()[-1])["run_id"]).summary.status == "finished"
    assert (here / "out.jsonl").read_text() == "2\n4\n6\n"
    assert len(environments(here)) == 1


LOCKED = """
version = 1
requires-python = ">=3.11"

[[package]]
name = "mine"
version = "0.1"
source = { virtual = "." }
dependencies = [{ name = "doubling-by-hand" }]

[package.metadata]
requires-dist = [{ name = "doubling-by-hand", specifier = ">=1" }]

[[package]]
name = "doubling-by-hand"
version = "1.0"
source = { registry = "wheels" }
wheels = [{ path = "doubling_by_hand-1.0-py3-none-any.whl" }]
"""


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv reads its lock files; pip install uv")
def test_a_lock_of_uv_is_read_by_uv(here):
    (here / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "0.1"\nrequires-python = ">=3.11"\ndependencies = ["doubling-by-hand>=1"]\n'
    )
    (here / "uv.lock").write_text(LOCKED)
    found = read_requirements("uv.lock")
    assert found.lines == ("doubling-by-hand==1.0",)
    assert found.options == (f"--find-links {here / 'wheels'}",)


def test_a_lock_of_uv_without_uv_is_refused(here, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (here / "uv.lock").write_text(LOCKED)
    with pytest.raises(JobError, match=r"requirements uv\.lock are read by uv, which is not installed; run: pip install uv"):
        read_requirements("uv.lock")


@pytest.mark.slow
def test_two_clients_install_once_and_one_that_is_killed_leaves_nothing_to_break(here):
    (here / "needed.txt").write_text(f"{OPTIONS}doubling_by_hand\n")
    command = [
        *own_processes.command("command-line"),
        "map",
        "at_the_top:twice",
        "--items",
        "items.jsonl",
        "--requirements",
        "needed.txt",
        "--max-workers",
        "1",
    ]

    def begun(out: str) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, "--out", out], stderr=subprocess.PIPE, text=True)

    killed = begun("killed.jsonl")
    assert killed.stderr is not None
    assert any("installing" in line for line in iter(killed.stderr.readline, ""))
    until = time.monotonic() + 30
    while not list((here / "home" / "environments").glob("*/pyvenv.cfg")) and time.monotonic() < until:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    both = [begun("a.jsonl"), begun("b.jsonl")]
    said = [process.communicate(timeout=100)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("installing" in text for text in said) == 1
    assert sum("another process installs the same requirements" in text for text in said) == 1
    assert Path("a.jsonl").read_text() == Path("b.jsonl").read_text() == "2\n4\n6\n"
