"""How long the parts of a service wait for each other before they take somebody for gone.

Whoever is killed is noticed at once: connections end, locks are given up. These times are for those who live and are silent,
stopped or cut off. Shorter ones mend sooner, and take the slow for the dead; that costs work, never samples.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimeouts:
    """Seconds, all above 0."""

    reader_lease_s: float = 15.0
    """A reader not heard of for so long has left."""
    loader_lease_s: float = 10.0
    """A loader not heard of for so long is given up."""
    shard_s: float = 10.0
    """A shard that lives and does not answer for so long is ended and started anew."""
    router_s: float = 15.0
    """The same of a router."""
    orphan_s: float = 60.0
    """A router or shard that nobody looks after ends after so long, once nobody reads."""
    loaders_idle_s: float = 60.0
    """Loaders without work end after so long."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise JobError(
                    f"{each.name} = {getattr(self, each.name)} of a data service is no time to wait",
                    remedy="give seconds above 0",
                )
