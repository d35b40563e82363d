"""`python -m ephemeron.dashboard.stop_process FOLDER [--now]`: stops the run of a folder, as `ephemeron stop` does by name."""

from __future__ import annotations

import sys
from pathlib import Path

from ephemeron.errors import EphemeronError, UserError
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.verbs import ask_to_stop


def main() -> int:
    """Exit code 0: asked; 1: refused, with one line on standard error."""
    folder, now = RunFolder(Path(sys.argv[1])), "--now" in sys.argv[2:]
    try:
        run = read_header(folder)
        if run is None:
            raise UserError(f"run {folder.run_id} has no readable run.json")
        ask_to_stop(folder, run, now=now)
    except EphemeronError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
