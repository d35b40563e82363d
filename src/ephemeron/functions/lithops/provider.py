"""Provider for Lithops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ephemeron.functions.async_invoke.provider import CapacityRequest, Provider, RunHandle
from ephemeron.functions.base import Limits
from ephemeron.functions.lithops import preflight
from ephemeron.functions.lithops.platform import LithopsPlatform, limits_of
from ephemeron.functions.lithops.settings import LOCALHOST, LithopsSettings, lithops_module


class Lithops(Provider[LithopsSettings]):
    name, title, settings = "lithops", "Lithops", LithopsSettings
    cold_start_s = 15.0
    """Lithops' storage and runtime, then the function's process with PyTorch."""
    extra, module = "lithops", "lithops"
    needs = "a backend in Lithops' configuration, or localhost"
    limits_from = "our defaults; AWS Lambda's lifetime"

    @property
    def limits(self) -> Limits:
        return limits_of(LithopsSettings())

    def inspect(self, settings: LithopsSettings, channel: str, secrets: dict[str, str]) -> Iterator[str]:
        yield f"Lithops {lithops_module().__version__}, backend {settings.backend}"
        if channel:
            preflight.check_channel(channel, settings, secrets)
            yield f"channel {channel} can be reached from there, by its address"

    def logs(self, settings: LithopsSettings) -> str:
        if settings.backend != LOCALHOST:
            return "lithops logs poll"
        from lithops.constants import LOGS_DIR

        return f"the files in {LOGS_DIR}"

    def admit(self, c: CapacityRequest, settings: LithopsSettings, secrets: dict[str, str]) -> tuple[CapacityRequest, Limits]:
        preflight.check_channel(c.channel, settings, secrets)
        preflight.check_places(settings, workers=c.workers)
        c = dataclasses.replace(c, memory_mb=c.memory_mb or int(settings.mb_per_vcpu), lifetime_s=c.lifetime_s or settings.lifetime_s)
        return c, limits_of(settings)

    async def open(self, hold: RunHandle, settings: LithopsSettings) -> LithopsPlatform:
        return await LithopsPlatform.open(hold.run_dir, settings, channel=hold.channel, run=hold.run)
