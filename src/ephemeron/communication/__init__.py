"""Data exchange between processes: channels through storage, keys and message formats, and RPC.

Importing this package imports none of its modules: each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.communication.channels.address import open_channel
    from ephemeron.communication.channels.base import Channel, Received, Traits
    from ephemeron.communication.channels.reduction import SupportsReduction
    from ephemeron.communication.channels.retrying import RetryPolicy
    from ephemeron.communication.channels.run_channel import RunChannel
    from ephemeron.communication.keys import Keys
    from ephemeron.communication.rpc import BlockingClient, BlockingServer, Client, Server

_LAZY = {
    "BlockingClient": "ephemeron.communication.rpc",
    "BlockingServer": "ephemeron.communication.rpc",
    "Channel": "ephemeron.communication.channels.base",
    "Client": "ephemeron.communication.rpc",
    "Keys": "ephemeron.communication.keys",
    "Received": "ephemeron.communication.channels.base",
    "RetryPolicy": "ephemeron.communication.channels.retrying",
    "RunChannel": "ephemeron.communication.channels.run_channel",
    "Server": "ephemeron.communication.rpc",
    "SupportsReduction": "ephemeron.communication.channels.reduction",
    "Traits": "ephemeron.communication.channels.base",
    "open_channel": "ephemeron.communication.channels.address",
}

__all__ = [
    "BlockingClient",
    "BlockingServer",
    "Channel",
    "Client",
    "Keys",
    "Received",
    "RetryPolicy",
    "RunChannel",
    "Server",
    "SupportsReduction",
    "Traits",
    "open_channel",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
