"""Sizes of objects without reading them, for tools that report leftovers, never for workers."""

from __future__ import annotations

from abc import ABC, abstractmethod


class SupportsSizes(ABC):
    """Declared by type, as an optional power; found with `isinstance`."""

    @abstractmethod
    async def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object whose key begins with `prefix`, by key in order.

        A cache counts the server's memory for an object, which is a little more than its size.

        Raises:
            ChannelUnreachable: the store does not answer.
        """
