"""Checks before Lithops is asked for a function; each refusal is one line."""

from __future__ import annotations

from urllib.parse import urlsplit

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.lithops.settings import LOCALHOST, LithopsSettings, lithops_module

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def check_channel(channel: str, settings: LithopsSettings, secrets: dict[str, str]) -> None:
    """Checks by its address that functions can reach the channel.

    Raises:
        JobError: it is on this machine and the functions are not, it has no address, or it needs credentials that
            functions do not have.
        MissingExtra: no Lithops.
    """
    lithops_module()
    parts = urlsplit(channel)
    if "://" not in channel:
        raise JobError(
            f"channel {channel!r} has no address that functions could be told",
            remedy="use s3://bucket/prefix, redis://HOST:PORT, or on localhost file:///folder",
        )
    here = parts.scheme == "file" or parts.hostname in _LOOPBACK
    if here and settings.backend != LOCALHOST:
        raise JobError(
            f"channel {channel!r} is on this machine, where functions of {settings.backend} cannot reach it",
            remedy="use s3://bucket/prefix, or redis://HOST:PORT of a service that they can reach",
        )
    if secrets:
        raise JobError(
            "functions do not get credentials from an address, because Lithops stores what they are called with",
            remedy="set EPHEMERON_CHANNEL_PASSWORD in the runtime",
        )


def check_places(settings: LithopsSettings, *, workers: int) -> None:
    """Whether all workers, which wait for each other, and a successor can run at once.

    Raises:
        PlanInfeasible: binding is `concurrency`.
    """
    if workers >= settings.places:
        raise PlanInfeasible(
            f"{workers} workers and a successor are wanted, {settings.places} functions may run at once; use fewer workers",
            binding="concurrency",
        )
