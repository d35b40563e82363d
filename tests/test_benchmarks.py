"""Each benchmark has a run at its smallest size, here or in the night; all of the night's can be imported and say their options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark_runs import LONG, ROOT, SHORT, found, run

OPTIONS = """
import contextlib, io, json, runpy, sys, traceback
found = {}
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as e:
            found[name] = said.getvalue() if not e.code else f"exit {e.code}"
        except BaseException:
            found[name] = traceback.format_exc()
print(json.dumps(found))
"""
"""What benchmarks say of their options, in one process: most of them import PyTorch."""


def test_every_benchmark_is_run() -> None:
    assert found() == SHORT.keys() | LONG.keys()
    assert not SHORT.keys() & LONG.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_at_its_smallest_size(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@pytest.mark.slow
def test_those_of_the_night_can_be_imported_and_say_their_options() -> None:
    done = subprocess.run([sys.executable, "-c", OPTIONS, *LONG], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    said = json.loads(done.stdout)
    assert said.keys() == LONG.keys()
    assert {name: text for name, text in said.items() if "--json" not in text} == {}
