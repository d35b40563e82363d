"""Bound on batches loaded ahead, in number and in bytes at the usual size of a batch. Pure.

Sizes are unknown until a batch is complete, so a load reserves the usual size. The bytes held are at most the limit
plus the excess of the batches under way over the usual size; the next batch is always loaded.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class PrefetchWindow:
    """Limits of the batches that are loaded ahead."""

    batches: int
    """Batches held or under way, at most."""
    limit_bytes: float
    """Bytes held, and expected of batches under way, at most."""
    unmeasured: int = 2
    """Batches under way, at most, while no size is known."""
    usual_bytes: int | None = None
    """Size of a batch; None: no batch has been complete yet."""

    def has_room(self, *, held: int, under_way: int, held_bytes: int) -> bool:
        """True if another batch may be requested.

        Args:
            held: complete batches.
            under_way: requested batches that are not complete.
            held_bytes: bytes that have arrived.
        """
        if held + under_way == 0:
            return True
        if held + under_way >= self.batches:
            return False
        if self.usual_bytes is None:
            return held + under_way < self.unmeasured
        return held_bytes + self.usual_bytes * (under_way + 1) <= self.limit_bytes
