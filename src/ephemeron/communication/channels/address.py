"""Channels by address: one string in a job names the store through which functions exchange objects.

Backends are imported only when their address is opened, since each costs import time at every cold start.
"""

from __future__ import annotations

from pathlib import Path

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.credentials import DIRECT, public_address
from ephemeron.config.paths import folder_of
from ephemeron.errors import JobError

ADDRESSES = (
    "memory, folder, file:///path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, "
    "redis://host:port/db, rediss://host:port/db, ps://host:port,host:port; direct, direct+STORE"
)
"""Everything that `open_channel` takes, for messages."""
_SCHEMES = ("file", "s3", "gs", "az", "redis", "rediss", "ps")


def is_direct(address: str) -> bool:
    """Whether functions exchange what they can without the store."""
    return address == "direct" or address.startswith(DIRECT)


def store_address(address: str) -> str:
    """Address of the store of a channel: that of a direct channel is where its functions find each other."""
    return "folder" if address == "direct" else address.removeprefix(DIRECT)


def check_channel(address: str) -> None:
    """Refuses an address that a run cannot use: `check_address`, but that a run may start a parameter server of its own."""
    if address != "parameter_server":
        check_address(address)


def check_address(address: str) -> None:
    """Refuses an address that says by itself that it cannot be opened.

    Raises:
        JobError: no such kind of address, or a folder whose path is not whole.
    """
    store = store_address(address)
    scheme, separator, _ = store.partition("://")
    if store.startswith("file://"):
        folder_of(store)
    elif store not in ("memory", "folder") and (not separator or scheme not in _SCHEMES):
        path = f", or for a folder {Path(store).absolute().as_uri()}" if store and not separator else ""
        raise JobError(f"channel {public_address(address)[0]!r} is of no known kind", remedy=f"use one of: {ADDRESSES}{path}")


def open_channel(address: str, *, base: Path | None = None) -> Channel:
    """Opens the channel at `address`, of a direct channel its store. Cheap: servers are connected to on the first operation.

    Args:
        address: see `ADDRESSES`.
        base: the folder that `folder` means.

    Raises:
        JobError: no such kind of address.
        MissingExtra: the optional dependency it needs is absent.
        ChannelUnreachable: a folder cannot be made.
    """
    check_address(address)
    address = store_address(address)
    scheme = address.partition("://")[0]
    if address == "memory":
        from ephemeron.communication.channels.memory import MemoryChannel

        return MemoryChannel()
    if address == "folder":
        from ephemeron.communication.channels.object_store import ObjectsChannel

        if base is None:
            raise JobError("the channel 'folder' needs a base folder", remedy="write file:///absolute/path")
        return ObjectsChannel.folder(base)
    if "://" in address:
        if scheme in ("file", "s3", "gs", "az"):
            from ephemeron.communication.channels.object_store import ObjectsChannel

            return ObjectsChannel.open(address)
        if scheme in ("redis", "rediss"):
            from ephemeron.communication.channels.cache import CacheChannel

            return CacheChannel(address)
        if scheme == "ps":
            from ephemeron.communication.channels.parameter_server import ParameterServerChannel

            return ParameterServerChannel(address)
    raise AssertionError(address)  # `check_address` knows others than are opened here
