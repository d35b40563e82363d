"""Processes of a lane (of pytest-xdist) begin with all test modules imported: they are forked from the controlling process, which has imported
them once. Each would need some 12 CPU seconds for it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.pathlib import import_path


def fork_workers(config: pytest.Config, n: int, modules: Sequence[Path]) -> None:
    """Imports `modules` and forks the next `n` processes that pytest-xdist will start. (What replaces a crashed one starts as ever.)

    A module that cannot be imported, or skips itself, is left to these processes, which say why. Threads that are there wait (of pytest-rerunfailures,
    for connections; of libraries), so no lock is held for ever.
    """
    from execnet import gateway_io  # type: ignore[import-not-found, import-untyped, unused-ignore]

    sys.path[:0] = dict.fromkeys(str(module.parent) for module in modules)  # helpers beside them; no two have one name
    for module in modules:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            import_path(module, root=config.rootpath, consider_namespace_packages=False)
    with contextlib.suppress(ImportError):
        from hypothesis.internal.conjecture.providers import _get_local_constants

        _get_local_constants()  # reads all modules
    gc.collect()
    gc.freeze()
    workers: list[_Worker] = []
    for _ in range(n):
        workers.append(_Worker(workers))

    class Master(gateway_io.Popen2IOMaster):  # type: ignore[misc, unused-ignore]
        def __init__(self, args: list[str], execmodel: Any) -> None:
            if workers:
                self.popen = workers.pop(0)
                gateway_io.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)
            else:
                super().__init__(args, execmodel)

    gateway_io.Popen2IOMaster = Master


class _Worker:
    """As much of `subprocess.Popen` as execnet needs."""

    def __init__(self, others: Sequence[_Worker]) -> None:
        stdin, to_worker = os.pipe()
        from_worker, stdout = os.pipe()
        self.stdin, self.stdout = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")
        self.pid = os.fork()
        if not self.pid:
            for worker in (self, *others):  # else a worker would not see that the controlling process has ended
                worker.stdin.close()
                worker.stdout.close()
            _serve(stdin, stdout)
        os.close(stdin)
        os.close(stdout)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _serve(stdin: int, stdout: int) -> NoReturn:
    """Does what `python -u -c` does with the line that execnet sends, to the end of the process."""
    code = 1
    try:
        for fd, number in ((stdin, 0), (stdout, 1)):
            os.dup2(fd, number)
            os.close(fd)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.argv, sys.modules["__main__"] = ["-c"], types.ModuleType("__main__")
        exec(eval(sys.stdin.readline() or "''"), sys.modules["__main__"].__dict__)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the controlling process's code
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)
