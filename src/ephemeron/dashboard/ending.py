"""Ends a run or a trial that a page asks to end.

A run is stopped as by `ephemeron stop`, in a process of its own (`stop_process`): platforms, their credentials and their libraries stay out of
the dashboard. A trial is ended by a file in its folder, which its study reads.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from ephemeron.config import own_processes
from ephemeron.errors import UserError

END_FILE = "end"
"""In the folder of a trial: its study is to end it."""
_TIMEOUT_S = 60.0


async def end_run(folder: Path, *, now: bool) -> str:
    """Asks a run to stop at its next checkpoint, or kills its functions.

    Returns:
        A sentence for the user.

    Raises:
        UserError: it was not stopped; with the reason.
    """
    arguments = own_processes.command("stop-run", str(folder), *(["--now"] if now else []))
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UserError(f"the platform of {folder.name} did not answer within {_TIMEOUT_S:g} s") from None
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = f"{folder.name} was not stopped: the process that asks it ended with {process.returncode}"
        raise UserError(lines[-1].removeprefix("error: ") if lines else reason)
    return "its functions were killed" if now else "it stops at its next checkpoint"


def end_trial(folder: Path) -> str:
    """Asks the study of a trial to end it.

    Returns:
        A sentence for the user.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        (folder / END_FILE).touch()
    except OSError as e:
        raise UserError(f"cannot write {folder / END_FILE}: {e.strerror}") from None
    return "its study ends it"
