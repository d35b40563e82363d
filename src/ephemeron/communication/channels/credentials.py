"""Addresses without their secrets: what may be shown and saved, and the environment variables for the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

DIRECT = "direct+"
"""Before the address of the store of a direct channel."""
_ENV = {
    "redis": ("EPHEMERON_CHANNEL_USER", "EPHEMERON_CHANNEL_PASSWORD"),
    "rediss": ("EPHEMERON_CHANNEL_USER", "EPHEMERON_CHANNEL_PASSWORD"),
    "ps": ("EPHEMERON_CHANNEL_TOKEN", "EPHEMERON_CHANNEL_TOKEN"),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}

_GIVEN: ContextVar[Mapping[str, str]] = ContextVar("ephemeron_channel_variables", default=MappingProxyType({}))


def public_address(address: str) -> tuple[str, dict[str, str]]:
    """Splits an address into what may be shown and saved, and the environment variables for the rest.

    Returns:
        The address without user, password or token, and e.g. `{"EPHEMERON_CHANNEL_PASSWORD": "..."}`.
    """
    if address.startswith(DIRECT):
        shown, variables = public_address(address.removeprefix(DIRECT))
        return DIRECT + shown, variables
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
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Gives variables, such as those of `public_address`, to the channels that this task and its children open inside.

    The environment of the process does not change: other runs in it have other variables.
    """
    token = _GIVEN.set({**_GIVEN.get(), **variables})
    try:
        yield
    finally:
        _GIVEN.reset(token)


def given() -> Mapping[str, str]:
    """Variables of all `environment`s around the caller."""
    return _GIVEN.get()


def variable(name: str) -> str | None:
    """Value of a variable: from `environment`, else from the environment of the process."""
    return _GIVEN.get().get(name) or os.environ.get(name)
