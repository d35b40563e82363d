"""One contiguous view of a caller's buffers, with at most one copy."""

from __future__ import annotations

from collections.abc import Sequence

from ephemeron.communication.channels.base import Buffer


def joined(buffers: Sequence[Buffer]) -> bytes | memoryview:
    """A single buffer as it is (as flat bytes), several joined into one."""
    if len(buffers) != 1:
        return b"".join(buffers)
    view = memoryview(buffers[0])
    if view.nbytes == 0:
        return b""
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")
