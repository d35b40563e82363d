"""The process of a driver function: drives a run as a client does that attaches to it, or tells it to stop.

It is killed at any time. Where the folder of the run is not shared with the client, it is copied from the channel first, and what changes
in it is copied back: before records that are in it are deleted from the store, every few seconds, and at the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path

from ephemeron import logs
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import RunNotFound, UserError
from ephemeron.runs import folders, run_platform, verbs
from ephemeron.runs.driver_function import KEY_VARIABLE, STEP_ASIDE
from ephemeron.runs.folder_copies import Copying, TermOver
from ephemeron.runs.folders import KEY_FILE, RunFolder

_log = logging.getLogger(__name__)

_NOT_DRIVEN = 1
"""Exit status of a process that was to stop a run which is not driven."""


def drive(run: str) -> None:
    """Goes on with a run to its end."""
    try:
        verbs.go_on(run)
    except RunNotFound as e:
        _log.info("%s", e)  # it was removed meanwhile


def main() -> None:
    request = json.loads(sys.argv[1])
    logs.configure()
    run, verb = request["run"], request["verb"]
    try:
        with contextlib.ExitStack() as stack:
            if request["channel"]:
                folder = RunFolder(folders.runs_folder() / run)
                folder.path.mkdir(parents=True, exist_ok=True)
                folder.events.touch()  # it has begun; empty files are not copied
                key = SigningKey.from_text(os.environ.pop(KEY_VARIABLE))
                if not (folder.path / KEY_FILE).exists():
                    (folder.path / KEY_FILE).write_text(f"{key.text}\n")
                    (folder.path / KEY_FILE).chmod(0o600)
                stack.enter_context(run_platform.driven_here(run, is_copied=True))
                if verb == "drive":
                    copying = Copying(
                        request["channel"], request["launch"], folder, key, request["term"], requests=Path(request["requests"])
                    )
                    stack.enter_context(copying.running(restored=True, term_over=lambda: os._exit(STEP_ASIDE)))
            if verb == "drive":
                drive(run)
            else:
                verbs.stop(run, now=verb == "now", wait=False)
    except TermOver:
        sys.exit(STEP_ASIDE)
    except UserError as e:
        if verb == "drive":
            raise
        _log.info("%s", e)  # it is not driven yet, or has ended meanwhile
        sys.exit(_NOT_DRIVEN)


if __name__ == "__main__":
    main()
