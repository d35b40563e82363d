"""Channels that know how large their objects are without reading them: for whoever looks what is left, never for workers."""

from __future__ import annotations

from abc import ABC, abstractmethod


class SupportsSizes(ABC):
    """Declared by type, as an optional power; found with `isinstance`."""

    @abstractmethod
    async def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object whose key begins with `prefix`, by key in order.

        A cache counts what the server keeps for it, which is a little more than what was put.

        Raises:
            ChannelUnreachable: the store does not answer.
        """
