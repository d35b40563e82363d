"""The program in `examples/joblib/`, small: the same with functions and with loky, and a picture."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "joblib" / "search.py"


@pytest.mark.slow
def test_a_search_on_functions_and_with_loky(tmp_path, monkeypatch):
    for package, extra in (("joblib", "joblib"), ("sklearn", "digits"), ("matplotlib", "report")):
        pytest.importorskip(package, reason=f"no {package}; pip install 'ephemeron[{extra}]'")
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    command = [sys.executable, PROGRAM, "--samples", "240", "--values", "2", "--repeats", "1", "--picture", "small.png"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    on_functions, by_loky, same, wrote = ran.stdout.splitlines()
    found = r"\{'C': 100\.0, 'gamma': [0-9.e-]+\}, accuracy 0\.[89]\d+, [0-9.]+ s"
    assert re.fullmatch(rf"functions: {found}, \$0\.\d+ for \d+ tasks: \d invocations?, .*", on_functions)
    assert re.fullmatch(rf"loky:      {found}", by_loky)
    assert same == "scores and importances are the same"
    assert wrote == "wrote small.png"
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
