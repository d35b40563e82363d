"""Programs that run in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from ephemeron.config import own_processes


@pytest.mark.parametrize("program", get_args(own_processes.Program))
def test_each_program_is_a_module_that_runs(program):
    found = importlib.util.find_spec(own_processes.module_of(program))
    assert found is not None
    assert '__name__ == "__main__"' in Path(found.origin or "").read_text()


@pytest.mark.cold_start
@pytest.mark.slow
@pytest.mark.parametrize("program", ["parameter-server", "data-service", "stop-run"])
def test_files_of_the_working_folder_take_no_module_s_place(tmp_path, program):
    for name in ("json", "asyncio", "click"):
        (tmp_path / f"{name}.py").write_text("print('a file of the user')")
    done = subprocess.run(
        own_processes.command(program), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert "a file of the user" not in done.stdout
    assert done.returncode != 0


def test_the_peak_is_of_this_process_and_not_of_the_one_that_started_it() -> None:
    child = "from ephemeron.config.own_processes import peak_mb; print(peak_mb())"
    parent = f"import subprocess, sys; held = bytes(range(256)) * 1_000_000; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True)
    assert 1 < float(done.stdout) < 200
