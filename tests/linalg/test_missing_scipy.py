"""Without SciPy, and where nothing can be written, commands and imports end in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron.cli.main import main
from ephemeron.errors import JobError
from ephemeron.linalg import BigMatrix

WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "scipy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "from ephemeron.cli.main import main; main()",
        "from ephemeron.linalg import cholesky",
        "import ephemeron.linalg.operations",
        "from ephemeron.linalg.execution import gathered",
    ],
)
def test_missing_scipy_names_the_extra(tmp_path: Path, program: str):
    np.save(tmp_path / "a.npy", np.eye(3))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + program, "linalg", "cholesky", "a.npy", "--out", "l.npy"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode != 0
    assert "scipy is not installed; run: pip install 'ephemeron[linalg]'" in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == ("main()" not in program)


def test_a_home_folder_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(JobError, match=r"home/matrices cannot be made: .*; set EPHEMERON_HOME"):
        BigMatrix.from_numpy(np.eye(3))
    np.save(tmp_path / "a.npy", np.eye(3))
    done = CliRunner().invoke(main, ["linalg", "cholesky", str(tmp_path / "a.npy"), "--out", str(tmp_path / "l.npy")])
    assert done.exit_code == 2
    assert len((done.output + done.stderr).strip().splitlines()) <= 2
    assert "EPHEMERON_HOME" in done.output + done.stderr
    a = BigMatrix.from_numpy(np.eye(3), store=(tmp_path / "store").as_uri())  # nothing is needed of the home folder here
    np.testing.assert_array_equal(a.to_numpy(), np.eye(3))
