"""A script in a thread that takes turns with the trainer: one of the two runs at a time.

While the script runs, it is the process's `__main__`, with its own arguments and its own `current()`. So several scripts can take
turns in one process, which the simulator does.
"""

from __future__ import annotations

import contextvars
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ephemeron.config.user_code import put_in_front
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.script import Run, active
from ephemeron.user_code import Interruption, guarded, raised_by

_JOIN_S = 5.0
"""Longest wait for a script whose own clean-up takes time. Its thread does not keep the process alive."""


class Abandoned(Interruption):
    """Ends the script's thread: its invocation is over."""


class ScriptEnded:
    """The script has come to its end."""


class Failed:
    """The script has raised an error.

    Args:
        error: with its traceback.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


class ScriptThread:
    """A script that is run up to its next report.

    Args:
        file: of the script.
        arguments: `sys.argv` after the file.
        folders: of the user's code, the script's first.
    """

    def __init__(self, file: Path, arguments: Sequence[str], folders: Sequence[Path]) -> None:
        self._file, self._folders = file, folders
        self._argv = [str(file), *arguments]
        self._module = ModuleType("__main__")
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._over = False
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._body,), name="script", daemon=True)

    def go(self, run: Run) -> object:
        """Lets the script run until it reports; returns the report, an `ScriptEnded` or a `Failed`."""
        with self._as_main(), active(run), eager_optimizers():
            if not self._thread.ident:
                put_in_front(self._folders)
                self._thread.start()
            self._turns.put(True)
            report = self._reports.get()
        self._over = self._over or isinstance(report, (ScriptEnded, Failed))
        return report

    def report(self, value: object) -> None:
        """In the script's thread: hands over to the trainer, and waits for the next turn."""
        if self._over:
            raise Abandoned
        self._reports.put(value)
        self._take_turn()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._over or not self._thread.ident:
            return
        self._over = True
        with self._as_main():
            self._turns.put(False)
            self._reports.get()
        self._thread.join(_JOIN_S)

    def _take_turn(self) -> None:
        if not self._turns.get():
            raise Abandoned

    def _body(self) -> None:
        try:
            self._take_turn()
            with guarded():
                run_file(self._file, self._module)
        except Abandoned:
            self._reports.put(ScriptEnded())
        except BaseException as e:  # noqa: BLE001 - the trainer raises it in its own thread
            raised = raised_by(e)
            ok = isinstance(raised, SystemExit) and raised.code in (None, 0)
            self._reports.put(ScriptEnded() if ok else Failed(e))
        else:
            self._reports.put(ScriptEnded())

    @contextmanager
    def _as_main(self) -> Iterator[None]:
        main, argv = sys.modules["__main__"], sys.argv
        sys.modules["__main__"], sys.argv = self._module, self._argv
        try:
            yield
        finally:
            sys.modules["__main__"], sys.argv = main, argv


def run_file(file: Path, module: ModuleType) -> None:
    """Runs a file as `__main__` in a module's namespace."""
    namespace: dict[str, Any] = module.__dict__
    namespace["__file__"] = str(file)
    exec(compile(file.read_bytes(), str(file), "exec"), namespace)
