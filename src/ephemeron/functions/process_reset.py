"""Reset of a process between two invocations, so that a warm function behaves like a fresh one.

Imported libraries are kept, which is the purpose of a warm start. The user's modules, import paths, environment variables, the
working folder and random states are reset. Threads that go on cannot be undone: they make the process unfit for another
invocation. Not covered: a library that user code has patched.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

_ENTROPY_BYTES = 32
_THREADS_S = 0.2
"""Time in which threads have to end after their invocation."""


def renew_randomness() -> None:
    """Draws the state of all random generators of this process anew: it may be one of many copies of a snapshot.

    PyTorch's generator begins with the same seed in every process, so it needs no new one.
    """
    ssl: Any = sys.modules.get("ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(_ENTROPY_BYTES), float(_ENTROPY_BYTES))
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


class ProcessSnapshot:
    """State of the process before an invocation. Made just before it; `restore` undoes the changes.

    Args:
        scratch: becomes the working folder, HOME and TMPDIR; without symbolic links.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._environ = dict(os.environ)
        self._path = list(sys.path)
        self._threads = set(threading.enumerate())
        torch: Any = sys.modules.get("torch")
        self._torch = torch
        if torch is not None:
            self._torch_state = (
                torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(),
                torch.random.default_generator.initial_seed(),
            )
        os.chdir(self._scratch)
        os.environ["HOME"] = os.environ["TMPDIR"] = str(self._scratch)
        tempfile.tempdir = None  # it remembers the folder it found first

    def restore(self) -> bool:
        """Returns whether the process is fit for another invocation."""
        os.chdir("/")
        if dict(os.environ) != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        tempfile.tempdir = None
        sys.path[:] = self._path
        for name in [name for name, module in sys.modules.items() if self._is_users(module)]:
            del sys.modules[name]
        for entry in [entry for entry in sys.path_importer_cache if self._inside(entry)]:
            del sys.path_importer_cache[entry]
        self._forget_randomness()
        return self._threads_ended()

    def _forget_randomness(self) -> None:
        renew_randomness()
        if self._torch is not None:
            # Only what differs, and not `torch.manual_seed`: each may import the compiler, 0.8 s of CPU time.
            torch = self._torch
            dtype, deterministic, seed = self._torch_state
            if torch.get_default_dtype() != dtype:
                torch.set_default_dtype(dtype)
            if torch.are_deterministic_algorithms_enabled() != deterministic:
                torch.use_deterministic_algorithms(deterministic)
            torch.random.default_generator.manual_seed(seed)

    def _threads_ended(self) -> bool:
        end = time.monotonic() + _THREADS_S
        for thread in set(threading.enumerate()) - self._threads:
            if isinstance(thread, threading._DummyThread):  # of a library's pool, known since it has called Python: PyArrow's reads do
                continue
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                return False
        return True

    def _is_users(self, module: ModuleType) -> bool:
        # Not `getattr`: some modules import half a library when asked for an attribute they lack.
        known = getattr(module, "__dict__", {})
        files = [known.get("__file__")]
        if files == [None]:
            files = list(known.get("__path__") or ())  # a package without `__init__.py`
        return any(isinstance(file, str) and self._inside(file) for file in files)

    def _inside(self, path: str) -> bool:
        return path == str(self._scratch) or path.startswith(f"{self._scratch}{os.sep}")
