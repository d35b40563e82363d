"""Files to start from run as they are, and shells complete commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ephemeron.cli.main import main


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    place = tmp_path / "start"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    yield place
    for name in ("model", "task", "words"):
        sys.modules.pop(name, None)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("job", ("train", "job.toml", "--epochs", "1")),
        ("task", ("train", "task:Classifier", "--workers", "2", "--batch-size", "32", "--epochs", "1")),
        ("map", ("map", "words:count", "--items", "items.jsonl", "--out", "counts.jsonl")),
    ],
)
def test_what_is_written_runs(kind: str, command: tuple[str, ...]) -> None:
    made = invoke("init", kind)
    assert made.exit_code == 0, made.output
    assert " ".join(command[:2]) in made.output, "it says how"
    done = invoke(*command, "--platform", "simulated")
    assert done.exit_code == 0, done.output
    if kind == "map":
        assert json.loads(Path("counts.jsonl").read_text().splitlines()[0]) == {"words": 5, "letters": 15}


def test_files_that_are_there_stay(place: Path) -> None:
    (place / "model.py").write_text("mine")
    made = invoke("init", "job")
    assert made.exit_code == 2
    assert "model.py is there already; name another folder with --out" in made.output
    assert not (place / "job.toml").exists()
    made = invoke("init", "job", "--out", "own one")
    assert made.exit_code == 0
    assert 'name = "own one"' in (place / "own one" / "job.toml").read_text()
    assert (place / "model.py").read_text() == "mine"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(shell: str) -> None:
    done = invoke("completion", shell)
    assert done.exit_code == 0, done.output
    assert "_EPHEMERON_COMPLETE" in done.output


def test_bash_completes_commands_and_options(place: Path) -> None:
    words = {"COMP_WORDS": "ephemeron trai", "COMP_CWORD": "1"}, {"COMP_WORDS": "ephemeron map --chann", "COMP_CWORD": "2"}
    said = []
    for word in words:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(place), "_EPHEMERON_COMPLETE": "bash_complete", **word}
        program = "import sys; sys.argv[0] = 'ephemeron'; from ephemeron.cli.main import main; main(prog_name='ephemeron')"
        said.append(subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False).stdout)
    assert "plain,train" in said[0]
    assert "plain,--channel" in said[1]
