"""Standard output without what solvers print by themselves (HiGHS says where it transforms a solution, in any case)."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def solvers_to_stderr() -> Iterator[None]:
    """While it is open, whatever is written to standard output by anybody of this process goes to standard error."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # it is closed: there is nothing to be kept clean
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what C has kept back would come later, in the middle of ours
        os.dup2(kept, 1)
        os.close(kept)
