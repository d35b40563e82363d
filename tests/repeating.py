"""Runs a test until it fails: `make test-repeat TEST=tests/path.py::name N=200 J=1`, or `python tests/repeating.py TEST [--count N] [--jobs J]`.

Each repetition has parameters of its own, so a test of one parameter, `name[4]`, is no longer found by its name. This module is also the
plugin that repeats tests and finds it. Nothing is tried a second time, and folders of repetitions that pass are removed at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
WANTED = "EPHEMERON_TESTS_REPEATED"
LANES = ("--warm-starts", "--fail-leaks")
"""What the lanes are run with."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--count", type=int, default=1, help="run each test so often")


@pytest.fixture
def repetition(request: pytest.FixtureRequest) -> object:
    """Which one this is."""
    return request.param


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A repetition has its number, and how many there are, as the last parameters of its name."""
    count = metafunc.config.getoption("--count")
    if count > 1:
        metafunc.fixturenames.append("repetition")
        ids = [f"{n}-{count}" for n in range(1, count + 1)]
        metafunc.parametrize("repetition", range(count), indirect=True, ids=ids, scope="function")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the test of the parameters that were asked for."""
    wanted = os.environ.get(WANTED, "").partition("::")[2]
    if "[" in wanted:
        dropped = [item for item in items if original(item.nodeid).partition("::")[2] != wanted]
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How many repetitions there were, and how long each took, with its fixtures."""
    reports = [each for many in terminalreporter.stats.values() for each in many if isinstance(each, pytest.TestReport)]
    ran = {each.nodeid for each in reports}
    if ran and (count := config.getoption("--count")) > 1:
        whole, each_s = count * len(set(map(original, ran))), sum(each.duration for each in reports) / len(ran)
        terminalreporter.write_line(f"{len(ran)} of {whole} repetitions, {each_s:.2f} s each")


def original(nodeid: str) -> str:
    """The name of a test, of that of a repetition of it."""
    return re.sub(r"\[(?:(.*)-)?\d+-\d+\]$", lambda found: f"[{found[1]}]" if found[1] is not None else "", nodeid)


def command(test: str, count: int, jobs: int, *more: str) -> tuple[list[str], dict[str, str]]:
    """What runs a test many times, and the variables for it."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        str(jobs if jobs > 1 else 0),
        "--dist",
        "load",
        "--count",
        str(count),
        "-p",
        "repeating",
        "-p",
        "no:rerunfailures",
        "-p",
        "no:repeat",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=--timeout=900",
        "-o",
        "tmp_path_retention_policy=failed",
        *more,
        test.partition("[")[0],
    ]
    if (TESTS.parent / test.partition("::")[0]).is_relative_to(TESTS):
        words += LANES
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    return words, {WANTED: test, "PYTHONPATH": path}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the test; the exit status is pytest's."""
    parser = argparse.ArgumentParser(prog="python tests/repeating.py", description=__doc__.partition("\n")[0])
    parser.add_argument("test", help="as pytest names it")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="processes; each has servers and fixtures of its own")
    arguments = parser.parse_args(argv)
    words, environ = command(arguments.test, arguments.count, arguments.jobs, "-x")
    return subprocess.call(words, cwd=TESTS.parent, env={**os.environ, **environ})


if __name__ == "__main__":
    sys.exit(main())
