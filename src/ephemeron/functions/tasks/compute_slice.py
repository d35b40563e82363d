"""Running a few tasks in one turn of the compute thread, and interrupting a task that takes too long.

A turn costs about 0.1 ms, so tasks of microseconds share one. Python code is interrupted by an exception that is raised in its
thread; code that blocks in C ends its task when it returns, or not at all: then the executor ends.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ephemeron.errors import UserError
from ephemeron.functions.shipped_code import with_own_paths
from ephemeron.functions.tasks.model import TaskSpec
from ephemeron.functions.tasks.resolver import TaskFunction
from ephemeron.user_code import Interruption, RaisedByUserCode, failure, guarded, raised_by, text_of

_STACK_CHARACTERS = 8_000


class TaskInterrupted(Interruption):
    """Raised in the thread of a task that is to end."""


_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OURS = tuple(os.path.join(_PACKAGE, name) for name in ("functions", "maps"))


def _users(e: BaseException) -> BaseException:
    """The exception without frames of the executor at the beginning of its traceback."""
    e = raised_by(e)
    trace = e.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return e.with_traceback(trace)


def _told(e: BaseException) -> tuple[str, str]:
    """An exception as one line, and its traceback; an error of use that we have raised, as of a result that cannot be stored, is its text alone. Of others the
    class is named, too: clients raise it again."""
    e = raised_by(e)
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(e.__traceback__)]
    if type(e) is UserError and all(name.startswith(_PACKAGE + os.sep) for name in frames):
        return text_of(e), ""
    error, trace = failure(_users(e))
    return error, with_own_paths(trace)


@dataclass(frozen=True, slots=True)
class Job:
    """A task that can begin: its code and its inputs are there."""

    task: TaskSpec
    function: TaskFunction
    inputs: Sequence[memoryview]
    encode_error: Callable[[Exception], bytes]
    """See `Resolver`."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A task that ran."""

    value: object = None
    error: str = ""
    traceback: str = ""
    data: bytes | None = None
    """Of the exception."""
    compute_s: float = 0.0


@dataclass(slots=True)
class ComputeSlice:
    """Jobs that run one after the other on one thread."""

    jobs: Sequence[Job]
    ran: list[Ran] = field(default_factory=list)
    """Of the first jobs; grows while the slice runs."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: int | None = None
    _ends: bool = False

    def __call__(self) -> list[Ran]:
        """Runs them, on whichever thread."""
        for job in self.jobs:
            if self._ends:
                break
            self.ran.append(self._run(job))
        return self.ran

    def _run(self, job: Job) -> Ran:
        began, data = time.perf_counter(), b""
        try:
            with self._lock:
                self._thread = threading.get_ident()
            try:
                with guarded():
                    value = job.function(job.task, job.inputs)
            except Exception as e:
                if not isinstance(e, RaisedByUserCode):
                    data = job.encode_error(e)
                raise
            finally:
                with self._lock:
                    self._thread = None
        except (Exception, TaskInterrupted) as e:  # noqa: BLE001 - the user's
            error, trace = _told(e)
            return Ran(error=error, traceback=trace, data=data or None, compute_s=time.perf_counter() - began)
        return Ran(value=value, compute_s=time.perf_counter() - began)

    def stack(self) -> str:
        """Where the running task is now; empty: none runs."""
        with self._lock:
            frame = None if self._thread is None else sys._current_frames().get(self._thread)
            return "" if frame is None else "".join(traceback.format_stack(frame))[-_STACK_CHARACTERS:]

    def interrupt(self) -> None:
        """Raises `TaskInterrupted` in the running task; later ones do not begin."""
        with self._lock:
            self._ends = True
            if self._thread is not None:
                raising: Callable[..., int] = ctypes.pythonapi.PyThreadState_SetAsyncExc
                raising(ctypes.c_ulong(self._thread), ctypes.py_object(TaskInterrupted))
