"""Programs that run in processes of their own."""

from __future__ import annotations

import importlib.util
import subprocess
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
