"""A caller's buffers as flat views, or as one of them with at most one copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ephemeron.communication.channels.base import Buffer


def joined(buffers: Sequence[Buffer]) -> bytes | memoryview:
    """A single buffer as it is (as flat bytes), several joined into one."""
    if len(buffers) != 1:
        return b"".join(buffers)
    return next(flat(buffers), b"")


def flat(buffers: Iterable[Buffer]) -> Iterator[memoryview]:
    """Each buffer as bytes, without a copy and without those that are empty."""
    for buffer in buffers:
        view = memoryview(buffer)
        if view.nbytes:
            yield view if view.ndim == 1 and view.format == "B" else view.cast("B")
