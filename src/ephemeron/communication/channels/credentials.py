"""Addresses without their secrets: what may be shown and saved, and the environment variables for the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

_ENV = {
    "redis": ("EPHEMERON_CHANNEL_USER", "EPHEMERON_CHANNEL_PASSWORD"),
    "rediss": ("EPHEMERON_CHANNEL_USER", "EPHEMERON_CHANNEL_PASSWORD"),
    "ps": ("EPHEMERON_CHANNEL_TOKEN", "EPHEMERON_CHANNEL_TOKEN"),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}


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


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables, such as those of `public_address`, for this process only while it needs them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
