"""Odd options, caches of functions, a home folder that cannot be written, a full disk: one line each."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ephemeron.errors import JobError, PlatformError
from ephemeron.executor import FunctionExecutor, drivers
from ephemeron.functions.shipped_code import dumps
from ephemeron.user_code import unpickled


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_no_channel_is_a_folder_of_this_machine():
    with FunctionExecutor("local", channel=None) as pool:
        assert pool.channel == "folder"
    with pytest.raises(JobError, match=r"channel = 7 is no address"):
        FunctionExecutor("local", channel=7)


def test_a_home_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "file"))
    with pytest.raises(JobError, match=r"cannot make .*: Not a directory; set EPHEMERON_HOME to a folder you can write"):
        FunctionExecutor("simulated")


def test_a_refused_price_file_leaves_no_folder(home, tmp_path):
    with pytest.raises(JobError, match="price file"):
        FunctionExecutor("simulated", prices_file=tmp_path / "absent.toml")
    assert not home.exists()


def test_a_full_disk_is_one_line(monkeypatch, caplog):
    def full(options, *, folder, **details):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr(drivers, "opened", full)
    with FunctionExecutor("simulated", max_workers=1) as pool:
        future = pool.submit(abs, -1)
        with pytest.raises(PlatformError, match="the executor has failed: No space left on device"):
            future.result(60)
    assert "Traceback" not in caplog.text


def test_results_that_cannot_be_written_are_one_line(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from ephemeron.cli.main import main

    monkeypatch.chdir(tmp_path)
    Path("items.jsonl").write_text("1\n2\n")
    command = ["map", "math:sqrt", "--items", "items.jsonl", "--platform", "simulated", "--max-workers", "1"]
    ran = CliRunner().invoke(main, [*command, "--out", "nowhere/o.jsonl"])
    assert (ran.exit_code, "there is no folder" in ran.stderr) == (2, True)
    if Path("/dev/full").exists():
        ran = CliRunner().invoke(main, [*command, "--out", "/dev/full", "--results", "kept"])
        assert ran.exit_code == 1
        assert "/dev/full cannot be written: No space left on device; the results are recorded in file://" in ran.stderr
        ran = CliRunner().invoke(main, [*command, "--out", "out.jsonl", "--results", "kept"])
        assert (ran.exit_code, "2 of them recorded before" in ran.stderr) == (0, True)
        assert not isinstance(ran.exception, OSError)


PROGRAM = """
    import functools
    from ephemeron.functions.shipped_code import dumps
    import sys

    @functools.lru_cache(maxsize=7)
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    class Fit:
        @staticmethod
        @functools.cache
        def twice(n):
            return 2 * n

    def uses(n):
        return fibonacci(n) + Fit.twice(n)

    sys.stdout.buffer.write(dumps((fibonacci, uses), what="x"))
"""


def test_functions_with_a_cache_of_the_main_program_are_sent_by_value(tmp_path):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    made = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=True).stdout
    fibonacci, uses = unpickled(made)
    assert (fibonacci(30), uses(10)) == (832040, 75)
    assert fibonacci.cache_info().maxsize == 7
    assert fibonacci.cache_info().hits > 20
    assert uses.__globals__["fibonacci"] is fibonacci


def test_a_local_function_with_a_cache_is_sent_by_value():
    import functools

    @functools.lru_cache(None)
    def square(x):
        return x * x

    again = unpickled(dumps(square, what="x"))
    assert (again(3), again.cache_info().maxsize) == (9, None)
    with FunctionExecutor("simulated", max_workers=1) as pool:
        assert list(pool.map(square, range(3))) == [0, 1, 4]
