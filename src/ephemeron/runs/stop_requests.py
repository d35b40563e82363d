"""Requests to stop a run: one of several runs of a process, by the task that awaits it or by its session; or the run of another
process, by a file in its folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

from ephemeron.errors import UserError
from ephemeron.events import Event
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.lock import is_driven

_FILE, _NOW = "stop", "now"
_ASKED = "the run was asked to stop"


class RunStop:
    """Stops one run: at a checkpoint while it is driven, at once before that. Satisfies `lifecycle.StopRequests`."""

    def __init__(self) -> None:
        self.reason = ""
        """Of the first request that has one."""
        self._requested = False
        self._phase: Literal["before", "driven", "over"] = "before"
        self._task: asyncio.Task[object] | None = None
        self._callback: Callable[..., None] = lambda reason="": None

    def belongs_to(self, task: asyncio.Task[object] | None) -> None:
        """Names the task that prepares and drives the run."""
        self._task = task
        if self._requested and task is not None:
            task.cancel()

    @contextlib.contextmanager
    def handled(self, callback: Callable[..., None]) -> Iterator[None]:
        """Inside, requests call `callback`, with their reason."""
        self._phase, self._callback = "driven", callback
        if self._requested:
            callback(self.reason)
        try:
            yield
        finally:
            self._phase = "over"

    def request(self, reason: str = "") -> None:
        """Requests the end of the run, in the loop of its task. A second request without a reason kills its functions."""
        if self._requested and reason:
            return
        self._requested, self.reason = True, self.reason or reason
        if self._phase == "driven":
            self._callback(reason)
        elif self._phase == "before" and self._task is not None:
            self._task.cancel()

    def kill(self, reason: str) -> None:
        """Ends the functions of the run at once, in the loop of its task."""
        self.request(reason)
        self.request()


def request_stop(folder: RunFolder, *, now: bool) -> None:
    """Asks the client that drives a run to stop it, or to kill its functions.

    Raises:
        UserError: there is none.
    """
    if not is_driven(folder):
        raise UserError(f"run {folder.run_id} is not running")
    (folder.path / _FILE).write_text(_NOW if now else "")


def stop_requested(folder: RunFolder) -> Literal["", "stop", "now"]:
    """What the client of a run is asked for."""
    try:
        return "now" if (folder.path / _FILE).read_text() == _NOW else "stop"
    except FileNotFoundError:
        return ""


def obeying(stop: RunStop, folder: RunFolder, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
    """A callback for the events of a run that stops it, too, where another process asks for that."""
    done = ""

    def obeyed(event: Event) -> None:
        nonlocal done
        on_event(event)
        asked = stop_requested(folder)
        if asked in ("", done):
            return
        done = asked
        if asked == "now":
            stop.kill(_ASKED)
        else:
            stop.request(_ASKED)

    return obeyed


def withdraw_stop(folder: RunFolder) -> None:
    """Forgets a request that was made to an earlier client."""
    (folder.path / _FILE).unlink(missing_ok=True)
