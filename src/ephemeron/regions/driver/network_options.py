"""Connections between groups of functions: what is asked for, and what cannot work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ephemeron.errors import JobError
from ephemeron.training.job import Configuration, RunRegion
from ephemeron.training.worker.spec import GroupNetwork


def network_of(c: Configuration, group: RunRegion) -> GroupNetwork | None:
    """How a group connects to others; None: through the store."""
    if c.regions.communicator == "store":
        return None

    def named(path: Path | None) -> str:
        return "" if path is None else str(path.resolve())

    return GroupNetwork(
        listen=group.listen,
        endpoint=group.endpoint,
        relay=c.regions.relay,
        authority=named(c.regions.authority),
        certificate=named(group.certificate),
        certificate_key=named(group.certificate_key),
    )


def check_network(c: Configuration) -> None:
    """Refuses groups of which two could not connect, and certificates that not all have.

    Raises:
        JobError: names the group.
    """
    if c.regions.communicator == "store":
        given = [g.name for g in c.regions.region if g.listen or g.endpoint or g.certificate or g.certificate_key]
        if given or c.regions.relay or c.regions.authority:
            raise JobError(
                "listen, endpoint, relay and certificates are for regions that exchange over TCP",
                remedy='set communicator = "tcp", or leave them out',
            )
        return
    silent = [group.name for group in c.regions.region if not group.listen]
    if len(silent) > 1 and not c.regions.relay:
        raise JobError(
            f"regions {' and '.join(silent[:2])} cannot connect to each other: neither listens, and there is no relay",
            remedy="give one of them listen, or give relay",
        )
    for group in c.regions.region:
        place = f"region {group.name}"
        if group.listen:
            host = group.listen.rpartition(":")[0].strip("[]")
            if host in ("0.0.0.0", "::", "") and not group.endpoint:
                raise JobError(f"{place} listens at all addresses: others do not know which to use", remedy="give its endpoint")
        secured = [bool(c.regions.authority), bool(group.certificate), bool(group.certificate_key)]
        if any(secured) and not all(secured):
            raise JobError(f"{place}: authority, certificate and certificate_key belong together", remedy="give all three")


# -- credentials of a group of functions by name ------------------------------------------------------------------


def variables_of(prefix: str, where: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables by the names that a channel and its functions know.

    Args:
        prefix: beginning of their names, without the underscore that follows it; "": there are none.
        where: whose they are, for errors.
        environment: of the client; None: this process's.

    Raises:
        JobError: there is no variable of such a name.
    """
    if not prefix:
        return {}
    given = os.environ if environment is None else environment
    found = {name.removeprefix(f"{prefix}_"): value for name, value in given.items() if name.startswith(f"{prefix}_")}
    found.pop("", None)
    if not found:
        raise JobError(f"{where}: no environment variable begins with {prefix}_", remedy=f"set them, such as {prefix}_AWS_ACCESS_KEY_ID")
    return found
