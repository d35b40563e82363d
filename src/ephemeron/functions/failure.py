"""Exceptions of user code as text."""

from __future__ import annotations

import traceback

_TRACEBACK = 8_000
"""Last characters of a traceback that are kept."""


def failure(e: BaseException) -> tuple[str, str]:
    """An exception as one line, and its traceback."""
    trace = "".join(traceback.format_exception(e))[-_TRACEBACK:]
    while isinstance(e, BaseExceptionGroup) and len(e.exceptions) == 1:
        e = e.exceptions[0]
    text = " ".join([*str(e).split(), *(" ".join(note.split()) for note in getattr(e, "__notes__", ()))])[:1_000]
    return f"{type(e).__name__}: {text}" if text else type(e).__name__, trace
