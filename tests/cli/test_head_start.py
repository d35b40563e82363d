"""`train` starts the daemon of a run on this machine before it imports what the run needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from ephemeron.cli.training.train import head_start
from ephemeron.functions import early_daemon

JOB = """
model = "model:build"
loss = "cross_entropy"
optimizer = { target = "SGD", options = { lr = 0.1 } }
{run}
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="functions are forked on Linux only")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Environment variables of the daemons that are started."""
    found: list[Mapping[str, str]] = []

    @contextmanager
    def noted(env: Mapping[str, str]) -> Iterator[None]:
        found.append(env)
        yield

    monkeypatch.setattr(early_daemon, "early_daemon", noted)
    return found


@pytest.mark.parametrize(
    ("run", "flags", "starts"),
    [
        ("[run]\nworkers = 4", {}, True),
        ("", {"workers": 4, "sync": None}, True),
        ("", {}, False),  # planned first
        ("[run]\nworkers = 4\nplatform = 'simulated'", {}, False),
        ("[run]\nworkers = 4", {"platform": "aws"}, False),
        ("[run]\nworkers = 4\nplatform = 'simulated'", {"platform": "local"}, True),
        ("[run]\nworkers = 4\nchannel = 'parameter_server'", {}, False),  # the token of the server is not known yet
        ("[run]\nworkers = 'many'", {}, False),
        ("[run", {}, False),
    ],
)
def test_only_a_run_on_this_machine_that_is_not_planned_first(
    tmp_path: Path, begun: list[Mapping[str, str]], run: str, flags: dict[str, object], starts: bool
) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("{run}", run))
    with head_start(str(tmp_path / "job.toml"), flags):
        assert len(begun) == starts


@pytest.mark.parametrize("program", ["tasks:Classifier", "train.py"])
def test_of_other_programs_the_options_decide(begun: list[Mapping[str, str]], program: str) -> None:
    with head_start(program, {"platform": None}):
        assert begun == []
    with head_start(program, {"workers": 4}):
        assert len(begun) == 1


def test_an_absent_file_starts_nothing(tmp_path: Path, begun: list[Mapping[str, str]]) -> None:
    with head_start(str(tmp_path / "absent.toml"), {"workers": 4}):
        assert begun == []


def test_credentials_of_the_channel_are_among_its_variables(tmp_path: Path, begun: list[Mapping[str, str]]) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("{run}", ""))
    with head_start(str(tmp_path / "job.toml"), {"workers": 4, "channel": "redis://:secret@127.0.0.1:6379"}):
        assert begun[0]["EPHEMERON_CHANNEL_PASSWORD"] == "secret"


def test_it_comes_before_what_takes_long_to_import(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace("{run}", "[run]\nworkers = 4"))
    program = (
        "import sys; import ephemeron.cli.main; from ephemeron.cli.training.train import head_start\n"
        "from ephemeron.functions import early_daemon\n"
        f"with head_start({str(tmp_path / 'job.toml')!r}, {{}}):\n"
        "    print(len(early_daemon._waiting), [m for m in ('torch', 'numpy', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 []"
