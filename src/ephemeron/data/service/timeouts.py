"""Timeouts after which a part of the service is considered lost.

Killed processes are noticed at once: their connections end and their locks are released. These timeouts are for processes that
are alive and silent: stopped, overloaded or disconnected. Shorter ones recover sooner, and replace slow processes needlessly;
that costs work, never samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from ephemeron.config.typed import Positive, Typed


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimeouts(Typed):
    """Timeouts in seconds, all above 0."""

    reader_lease_s: Positive = 15.0
    """A reader without a heartbeat for so long is removed."""
    loader_lease_s: Positive = 10.0
    """A loader without a heartbeat for so long is given up."""
    shard_s: Positive = 10.0
    """A shard that is alive and does not answer for so long is replaced."""
    router_s: Positive = 15.0
    """A router that is alive and does not answer for so long is replaced."""
    orphan_s: Positive = 60.0
    """A router or shard that is not monitored for so long ends, once it has no readers."""
    loaders_idle_s: Positive = 60.0
    """Loaders without work end after so long."""
