"""What executors of killed clients have left in their channels. The next executor removes it; folders with events and logs stay."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from ephemeron.errors import EphemeronError, RunAlreadyDriven
from ephemeron.executor.kind import interrupted
from ephemeron.executor.programs import survives
from ephemeron.functions.local import is_hosted
from ephemeron.runs import cleanup
from ephemeron.runs.cleanup import RemainingObjects
from ephemeron.runs.folders import RESULT_FILE, RUN_FILE, RunFolder
from ephemeron.runs.header import RunHeader, read_header
from ephemeron.runs.lock import LOCK_FILE, driving, is_driven
from ephemeron.runs.summary import write_summary

_log = logging.getLogger(__name__)


async def find_remains(runs: Path) -> list[RemainingObjects]:
    """Executors whose clients were killed, with what is in their channels.

    Args:
        runs: folder of all runs.
    """
    return [await cleanup.look(folder) for folder, _ in _abandoned(runs)]


async def remove_remains(runs: Path) -> list[RemainingObjects]:
    """Removes the objects of executors whose clients were killed, unless their functions are still running; returns what was removed.

    Args:
        runs: see `find_remains`.
    """
    gone = []
    for folder, header in _abandoned(runs):
        with contextlib.suppress(OSError, EphemeronError, RunAlreadyDriven), driving(folder):
            each = await cleanup.look(folder)
            if each.problem or is_hosted(folder.path):
                continue
            if each.keys:
                await cleanup.delete(each)
            shutil.rmtree(folder.objects, ignore_errors=True)
            write_summary(folder, interrupted(folder, header))
            _log.info("deleted %d objects of executor %s, whose client was killed", len(each.keys), folder.run_id)
            gone.append(each)
    return gone


def _abandoned(runs: Path) -> Iterator[tuple[RunFolder, RunHeader]]:
    for path in sorted(runs.glob(f"*/{LOCK_FILE}")):
        folder = RunFolder(path.parent)
        if (folder.path / RESULT_FILE).exists() or not (folder.path / RUN_FILE).exists() or is_driven(folder):
            continue
        header = read_header(folder)
        if header is not None and header.kind == "tasks" and not survives(header):  # else another process may go on with it
            yield folder, header
