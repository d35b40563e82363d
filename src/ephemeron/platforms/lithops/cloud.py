"""Lithops, as runs take hold of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ephemeron.job import Configuration
from ephemeron.platforms.base import Limits
from ephemeron.platforms.lithops import preflight
from ephemeron.platforms.lithops.platform import LithopsPlatform, limits_of
from ephemeron.platforms.lithops.settings import LithopsSettings, lithops_module
from ephemeron.platforms.recorded.cloud import Cloud, Hold


class Lithops(Cloud[LithopsSettings]):
    name, title, settings = "lithops", "Lithops", LithopsSettings
    cold_start_s = 15.0
    """Lithops' storage, its runtime, then ours with PyTorch."""
    extra, module = "lithops", "lithops"
    needs = "a backend in Lithops' configuration, or localhost"
    limits_from = "our defaults; AWS Lambda's lifetime"

    @property
    def limits(self) -> Limits:
        return limits_of(LithopsSettings())

    def inspect(self, settings: LithopsSettings, channel: str) -> Iterator[str]:
        yield f"Lithops {lithops_module().__version__}, backend {settings.backend}"
        if channel:
            preflight.check_channel(channel, settings, {})
            yield f"channel {channel} can be reached from there, by its address"

    def admit(
        self, c: Configuration, settings: LithopsSettings, secrets: dict[str, str]
    ) -> tuple[Configuration, Limits]:
        preflight.check_channel(c.channel, settings, secrets)
        preflight.check_places(settings, workers=c.workers)
        c = dataclasses.replace(
            c, memory_mb=c.memory_mb or int(settings.mb_per_vcpu), lifetime_s=c.lifetime_s or settings.lifetime_s
        )
        return c, limits_of(settings)

    async def open(self, hold: Hold, settings: LithopsSettings) -> LithopsPlatform:
        return await LithopsPlatform.open(hold.run_dir, settings, channel=hold.channel, run=hold.run)
