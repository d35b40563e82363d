"""Provider for Ray."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

from ephemeron.functions.async_invoke.provider import CapacityRequest, Provider, RunHandle
from ephemeron.functions.base import Limits
from ephemeron.functions.ray import preflight
from ephemeron.functions.ray.platform import LIMITS, RayPlatform
from ephemeron.functions.ray.settings import RaySettings

LIFETIME_S = 3600.0
"""Default time limit of an invocation: Ray has none, and hand-offs keep work movable."""


class Ray(Provider[RaySettings]):
    name, title, settings = "ray", "Ray", RaySettings
    cold_start_s = 6.0
    """Ray's process, then the function's with PyTorch."""
    extra, module = "ray", "ray"
    needs = "a cluster (ray start --head)"
    limits_from = "only against mistakes; the nodes' resources hold"

    @property
    def limits(self) -> Limits:
        return LIMITS

    def inspect(self, settings: RaySettings, channel: str, secrets: dict[str, str]) -> Iterator[str]:
        if channel:
            preflight.check_channel(channel, secrets)
        found = preflight.inspect(settings, channel, probe=bool(channel))
        yield f"cluster {settings.address} answers"
        for node in found:
            yield f"node {node.host} ({node.id[:8]}): {node.cpus:g} CPUs, {node.memory_mb:.0f} MB" + (
                ", this release, and sees the channel" if channel else ""
            )

    def logs(self, settings: RaySettings) -> str:
        return "ray list actors --detail; ray logs actor --id ID"

    def admit(self, c: CapacityRequest, settings: RaySettings, secrets: dict[str, str]) -> tuple[CapacityRequest, Limits]:
        preflight.check_channel(c.channel, secrets)
        c = dataclasses.replace(c, memory_mb=c.memory_mb or int(settings.mb_per_vcpu), lifetime_s=c.lifetime_s or LIFETIME_S)
        found = preflight.inspect(settings, c.channel)
        preflight.check_fit(found, settings, workers=c.workers, memory_mb=c.memory_mb)
        return c, preflight.limits_of(found, settings, memory_mb=c.memory_mb)

    async def open(self, hold: RunHandle, settings: RaySettings) -> RayPlatform:
        found = await asyncio.to_thread(preflight.inspect, settings, hold.channel, probe=False)
        limits = preflight.limits_of(found, settings, memory_mb=hold.capacity.memory_mb)
        return await RayPlatform.open(hold.run_dir, settings, channel=hold.channel, run=hold.run, limits=limits)
