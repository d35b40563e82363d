"""Errors of libraries as one line of text."""

from __future__ import annotations

from ephemeron.user_code import line_of, raised_by


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none. Never raises."""
    try:
        lines = str(raised_by(error)).strip().splitlines()
    except Exception:  # noqa: BLE001 - the error's own code
        return line_of(error)
    return lines[0].rstrip(":") if lines else line_of(error)
