"""Channels: storage through which functions that cannot connect exchange objects (folder, bucket, cache, parameter server)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ephemeron.communication.channels.base import Buffer, Channel, Received, Traits, Wrapper

if TYPE_CHECKING:
    from ephemeron.communication.channels.address import open_channel
    from ephemeron.communication.channels.credentials import public_address
    from ephemeron.communication.channels.memory import MemoryChannel
    from ephemeron.communication.channels.reduction import SupportsReduction

_LAZY = {"MemoryChannel": "memory", "SupportsReduction": "reduction", "open_channel": "address", "public_address": "credentials"}

__all__ = ["Buffer", "Channel", "MemoryChannel", "Received", "SupportsReduction", "Traits", "Wrapper", "open_channel", "public_address"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
