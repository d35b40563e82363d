"""The folder in which ephemeron keeps what it keeps on this machine: EPHEMERON_HOME, or `~/.ephemeron`."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The home folder; made when something is first put there."""
    return Path(os.environ.get("EPHEMERON_HOME") or Path.home() / ".ephemeron")
