"""Origin of a run: the command line that began it, and the commit of its code."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ephemeron.communication.channels.credentials import public_address

_GIT_S = 5.0
"""Longest wait for git: a run does not depend on its answer."""
DIRTY = "-dirty"
"""End of a commit whose files have changed since."""


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command line of this process, as a shell would read it; empty in a notebook. Addresses have no credentials.

    Args:
        argv: program and arguments; None: `sys.argv`.
    """
    program, *arguments = sys.argv if argv is None else argv
    name = Path(program).name
    if name.startswith("ipykernel") or not name:
        return ""
    words = [name] if name == "ephemeron" or not program.endswith(".py") else ["python", program]
    return shlex.join([*words, *map(_shown, arguments)])


def _shown(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return option + equals + public_address(value)[0] if "://" in value else argument


def commit_of(folder: Path) -> str:
    """The commit of a folder, with `-dirty` if files of its repository have changed since; empty if it has none."""
    asked = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=_GIT_S, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
