"""Output of a run's functions, page by page: from an offset on, or the last bytes of it."""

from __future__ import annotations

from pathlib import Path

from ephemeron.dashboard.run_documents import Document
from ephemeron.dashboard.run_view import RunView
from ephemeron.events import Invoked

_MOST = 128 * 1024
"""Bytes in one answer."""


def output_of(view: RunView, invocation: str, offset: int | None) -> Document | None:
    """Text that an invocation has printed.

    Args:
        view: of its run.
        invocation: its name, which is one of the run's.
        offset: byte from which to read; None: the end of the text.

    Returns:
        Text, and the offset at which to go on; None: the run has no such invocation.
    """
    with view.lock:
        known = any(isinstance(e, Invoked) and e.invocation == invocation for e in view.calls)
    if not known:
        return None
    name = f"{invocation}.txt"
    folders = [view.folder.path, *(group.path for group in view.folder.groups)]
    path = next((p for folder in folders if (p := folder / "logs" / name).is_file() and _is_in(p, folder)), None)
    if path is None:
        return {"text": "", "offset": 0, "size": 0, "there": False}
    return _read(path, offset)


def _is_in(path: Path, folder: Path) -> bool:
    """Whether a file is where its name says: run folders of others may hold links, and names, that lead elsewhere."""
    return path.resolve().parent == folder.resolve() / "logs" and not path.is_symlink()


def _read(path: Path, offset: int | None) -> Document:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = max(0, size - _MOST) if offset is None or offset > size else offset
        file.seek(start)
        data = file.read(_MOST)
    if offset is None and start:
        data = data[data.find(b"\n") + 1 :]
    return {
        "text": data.decode(errors="replace"),
        "offset": start + len(data) if offset is not None else size,
        "size": size,
        "there": True,
        "cut": offset is None and start > 0,
    }
