"""Calls and exceptions of tests, where functions find them."""

from __future__ import annotations

import os
import signal
from pathlib import Path


class Refused(ValueError):
    """With what its caller needs."""

    def __init__(self, code, seen):
        super().__init__(code, seen)
        self.code = code


class Unreadable(Exception):
    def __init__(self, *, lock):
        super().__init__("cannot be pickled")
        self.lock = lock


def fatal_once(n, marks):
    if n == 2:
        try:
            Path(marks).touch(exist_ok=False)
        except FileExistsError:
            return n
        os.kill(os.getpid(), signal.SIGKILL)
    return n
