"""Where a run came from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ephemeron.runs.origin import DIRTY, command_line, commit_of


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/usr/bin/ephemeron", "train", "a b.py", "--", "--lr", "0.1"], "ephemeron train 'a b.py' -- --lr 0.1"),
        (["ephemeron", "map", "--channel=redis://:secret@host:1/2"], "ephemeron map --channel=redis://host:1/2"),
        (["ephemeron", "map", "--channel", "redis://user:secret@host/2"], "ephemeron map --channel redis://host/2"),
        (["mine.py", "4"], "python mine.py 4"),
        (["/lib/ipykernel_launcher.py", "-f", "kernel.json"], ""),
    ],
)
def test_command_lines_have_no_credentials(argv: list[str], shown: str) -> None:
    assert command_line(argv) == shown


def test_a_commit_says_whether_files_have_changed_since(tmp_path: Path) -> None:
    assert commit_of(tmp_path / "none") == commit_of(tmp_path) == ""
    (tmp_path / "a.py").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    clean = commit_of(tmp_path)
    assert len(clean) == 40
    (tmp_path / "a.py").write_text("2")
    assert commit_of(tmp_path) == clean + DIRTY
