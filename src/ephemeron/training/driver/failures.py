"""Errors of functions in one line. Pure.

Platforms report a failure as one line, `ValueError: no luck`, followed by a traceback. Messages show the line and its place in
the user's code. The whole traceback is in the log of the invocation (`ephemeron logs`).
"""

from __future__ import annotations

import re

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_BUNDLED = re.compile(r"/code/\d+/(.+)$")
"""Folder into which functions unpack the user's code."""
_FOREIGN = ("/site-packages/", "/lib/python", "/ephemeron/", "<frozen")


def in_short(error: str) -> str:
    """An error with its traceback as `ValueError: no luck (model.py, line 8)`."""
    line, _, trace = error.strip().partition("\n")
    for path, number in reversed(_FRAME.findall(trace)):
        bundled = _BUNDLED.search(path)
        if bundled or not any(part in path for part in _FOREIGN):
            name = bundled[1] if bundled else path.rpartition("/")[2]
            return f"{line} ({name}, line {number})"
    return line
