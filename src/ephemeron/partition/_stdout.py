"""Solvers without what they print by themselves: HiGHS says where it transforms a solution, whatever its log options are.

It does so by C's `stdout`. While a solver runs, that name leads to nowhere; file descriptor 1 and Python's `sys.stdout` stay as
they are, so what other threads print from Python is not lost. C code of other threads is silent meanwhile, too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_LOCK = threading.Lock()
_OPEN = 0
"""Solvers that run now."""
_KEPT: int | None = None
_SINK: int | None = None
"""Opened once and never closed: C code may still hold it."""


@contextmanager
def silent() -> Iterator[None]:
    """While it is open, what C code of this process prints by `printf` and its like is dropped; any number may be open at once.

    Where C's library is not glibc, whose `stdout` is a variable, nothing is done.
    """
    global _OPEN, _KEPT, _SINK
    out = _c_stdout()
    if out is None:
        yield
        return
    with _LOCK:
        if _OPEN == 0:
            if _SINK is None:
                opening: Any = ctypes.CDLL(None).fopen
                opening.restype = ctypes.c_void_p
                _SINK = opening(os.devnull.encode(), b"w")
            _KEPT, out.value = out.value, _SINK if _SINK is not None else out.value
        _OPEN += 1
    try:
        yield
    finally:
        with _LOCK:
            _OPEN -= 1
            if _OPEN == 0:
                out.value = _KEPT


@cache
def _c_stdout() -> ctypes.c_void_p | None:
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        return ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stdout")
    except (ValueError, OSError, TypeError):
        return None
