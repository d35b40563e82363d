"""Suppression of solver output: HiGHS prints when it transforms a solution, independent of its log options.

It prints to C's `stdout`. While a solver runs, that variable points to the null device. File descriptor 1 and Python's `sys.stdout` do
not change, so Python output of other threads is kept; output of C code in other threads is dropped, too.
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
"""Number of open contexts."""
_KEPT: int | None = None
_SINK: int | None = None
"""Opened once and never closed: C code may still hold it."""


@contextmanager
def silent() -> Iterator[None]:
    """Context in which output of C code by `printf` and similar functions is dropped; contexts may overlap.

    Without glibc, whose `stdout` is a variable, nothing happens.
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
