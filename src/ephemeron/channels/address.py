"""Channels by address: one string in a job says where functions exchange what they have.

Backends are imported only when their address is opened, since each costs import time at every cold start.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from ephemeron.channels.base import Channel
from ephemeron.errors import JobError

ADDRESSES = (
    "memory, folder, file:///path, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, "
    "redis://host:port/db, rediss://host:port/db, ps://host:port,host:port"
)
"""Everything that `open_channel` takes, for messages."""

_ENV = {
    "redis": ("EPHEMERON_CHANNEL_USER", "EPHEMERON_CHANNEL_PASSWORD"),
    "rediss": ("EPHEMERON_CHANNEL_USER", "EPHEMERON_CHANNEL_PASSWORD"),
    "ps": ("EPHEMERON_CHANNEL_TOKEN", "EPHEMERON_CHANNEL_TOKEN"),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}


def open_channel(address: str, *, base: Path | None = None) -> Channel:
    """Opens the channel at `address`. Cheap: servers are first spoken to when something is put or read.

    Args:
        address: see `ADDRESSES`.
        base: the folder that `folder` means.

    Raises:
        JobError: no such kind of address.
        MissingExtra: the optional dependency it needs is absent.
        ChannelUnreachable: a folder cannot be made.
    """
    scheme = address.partition("://")[0]
    if address == "memory":
        from ephemeron.channels.memory import MemoryChannel

        return MemoryChannel()
    if address == "folder":
        from ephemeron.channels.objects import ObjectsChannel

        if base is None:
            raise JobError("the channel 'folder' needs a base folder", remedy="write file:///absolute/path")
        return ObjectsChannel.folder(base)
    if "://" in address:
        if scheme in ("file", "s3", "gs", "az"):
            from ephemeron.channels.objects import ObjectsChannel

            return ObjectsChannel.open(address)
        if scheme in ("redis", "rediss"):
            from ephemeron.channels.cache import CacheChannel

            return CacheChannel(address)
        if scheme == "ps":
            from ephemeron.channels.parameter_server import ParameterServerChannel

            return ParameterServerChannel(address)
    raise JobError(f"channel {public_address(address)[0]!r} is of no known kind", remedy=f"use one of: {ADDRESSES}")


def public_address(address: str) -> tuple[str, dict[str, str]]:
    """Splits an address into what may be shown and saved, and the environment variables for the rest.

    Returns:
        The address without user, password or token, and e.g. `{"EPHEMERON_CHANNEL_PASSWORD": "..."}`.
    """
    parts = urlsplit(address)
    credentials, at, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    given = {"username": user, "password": password}
    kept = []
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in given:
            given[name] = value
        else:
            kept.append((name, value))
    if not at and len(kept) == len(parse_qsl(parts.query, keep_blank_values=True)):
        return address, {}
    names = _ENV.get(parts.scheme, ("EPHEMERON_CHANNEL_USER", "EPHEMERON_CHANNEL_PASSWORD"))
    env = {name: unquote(value) for name, value in zip(names, given.values(), strict=True) if value}
    return urlunsplit(parts._replace(netloc=hosts, query=urlencode(kept))), env
