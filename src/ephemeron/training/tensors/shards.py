"""Division of a flat vector into K shards, or any number of chunks (FasDL, equation 3-1: S_s = S_m / K)."""

from __future__ import annotations


def bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """Start and stop of each of `parts` consecutive pieces whose lengths differ by at most one.

    More parts than elements are allowed: the last ones are empty.
    """
    if parts < 1:
        raise ValueError(f"parts = {parts} should be at least 1")
    base, extra = divmod(size, parts)
    out, start = [], 0
    for part in range(parts):
        stop = start + base + (part < extra)
        out.append((start, stop))
        start = stop
    return out


def chunk_bounds(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """Cuts `start:stop` into pieces of about `chunk` elements; an empty range is one empty piece."""
    pieces = max(1, -(-(stop - start) // max(1, chunk)))
    return [(start + a, start + b) for a, b in bounds(stop - start, pieces)]
