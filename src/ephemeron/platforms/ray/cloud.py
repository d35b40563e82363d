"""A Ray cluster, as runs take hold of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

from ephemeron.job import Configuration
from ephemeron.platforms.base import Limits
from ephemeron.platforms.ray import preflight
from ephemeron.platforms.ray.platform import LIMITS, RayPlatform
from ephemeron.platforms.ray.settings import RaySettings
from ephemeron.platforms.recorded.cloud import Cloud, Hold

LIFETIME_S = 3600.0
"""Of one invocation, where nobody says: Ray has no limit, and a hand-over now and then keeps work movable."""


class Ray(Cloud[RaySettings]):
    name, title, settings = "ray", "Ray", RaySettings
    cold_start_s = 6.0
    """Ray's process, then ours with PyTorch."""
    extra, module = "ray", "ray"
    needs = "a cluster (ray start --head)"
    limits_from = "only against mistakes; the nodes' resources hold"

    @property
    def limits(self) -> Limits:
        return LIMITS

    def inspect(self, settings: RaySettings, channel: str) -> Iterator[str]:
        if channel:
            preflight.check_channel(channel, {})
        found = preflight.inspect(settings, channel, probe=bool(channel))
        yield f"cluster {settings.address} answers"
        for node in found:
            yield f"node {node.host} ({node.id[:8]}): {node.cpus:g} CPUs, {node.memory_mb:.0f} MB" + (
                ", this release, and sees the channel" if channel else ""
            )

    def admit(self, c: Configuration, settings: RaySettings, secrets: dict[str, str]) -> tuple[Configuration, Limits]:
        preflight.check_channel(c.channel, secrets)
        c = dataclasses.replace(
            c, memory_mb=c.memory_mb or int(settings.mb_per_vcpu), lifetime_s=c.lifetime_s or LIFETIME_S
        )
        found = preflight.inspect(settings, c.channel)
        preflight.check_fit(found, settings, workers=c.workers, memory_mb=c.memory_mb)
        return c, preflight.limits_of(found, settings, memory_mb=c.memory_mb)

    async def open(self, hold: Hold, settings: RaySettings) -> RayPlatform:
        found = await asyncio.to_thread(preflight.inspect, settings, hold.channel, probe=False)
        limits = preflight.limits_of(found, settings, memory_mb=hold.configuration.memory_mb)
        return await RayPlatform.open(hold.run_dir, settings, channel=hold.channel, run=hold.run, limits=limits)
