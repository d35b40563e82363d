"""Provider for OpenFaaS."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.provider import CapacityRequest, Provider, RunHandle
from ephemeron.functions.async_invoke.sizes import sizes_text
from ephemeron.functions.base import Limits
from ephemeron.functions.openfaas import preflight
from ephemeron.functions.openfaas.platform import LIMITS, OpenFaasPlatform
from ephemeron.functions.openfaas.settings import OpenFaasSettings, credentials
from ephemeron.functions.source_bundle import digest

SPARE = 1
"""Replicas beside those of the workers, for a successor that comes while its predecessor still runs."""


class OpenFaas(Provider[OpenFaasSettings]):
    name, title, settings = "openfaas", "OpenFaaS", OpenFaasSettings
    cold_start_s = 5.0
    """Replicas wait with their imports made; the time includes a retry of the queue."""
    needs = "a cluster; then: ephemeron cloud deploy openfaas"
    limits_from = "only against mistakes; the deployed function's hold"

    @property
    def limits(self) -> Limits:
        return LIMITS

    def inspect(self, settings: OpenFaasSettings, channel: str, secrets: dict[str, str]) -> Iterator[str]:
        yield f"gateway {settings.gateway}"
        if channel:
            preflight.check_channel(channel, settings, secrets)
            yield f"channel {channel} can be reached from there, by its address"
        found = preflight.inspect(settings)
        yield (
            f"function {settings.function}: {sizes_text(found.sizes_mb)}, {found.lifetime_s:g} s, image {found.image}; "
            f"{found.available} of at most {found.replicas} replicas run"
        )
        preflight.check_fit(found, settings, workers=1, memory_mb=found.memory_mb, lifetime_s=found.lifetime_s, digest=digest())
        yield f"its code is of this release ({found.digest})" if found.digest else "the code that it runs is unknown"

    def sizes(self, settings: OpenFaasSettings) -> tuple[int, ...]:
        return preflight.inspect(settings).sizes_mb

    def recorded(self, settings: OpenFaasSettings, limits: Limits) -> OpenFaasSettings:
        return dataclasses.replace(settings, sizes_mb=limits.sizes_mb, lifetime_s=limits.lifetime_s)

    def logs(self, settings: OpenFaasSettings) -> str:
        return f"faas-cli logs {settings.function} --gateway {settings.gateway}"

    def admit(self, c: CapacityRequest, settings: OpenFaasSettings, secrets: dict[str, str]) -> tuple[CapacityRequest, Limits]:
        preflight.check_channel(c.channel, settings, secrets)
        try:
            deployed = preflight.inspect(settings)
        except JobError:
            if not settings.sizes_mb:
                raise
            known = _known_limits(settings)  # see `open`
            return dataclasses.replace(c, memory_mb=c.memory_mb or known.sizes_mb[0], lifetime_s=c.lifetime_s or known.lifetime_s), known
        c = dataclasses.replace(c, memory_mb=c.memory_mb or deployed.memory_mb, lifetime_s=c.lifetime_s or deployed.lifetime_s)
        _check_fit(deployed, settings, c)
        return c, deployed.limits

    async def open(self, hold: RunHandle, settings: OpenFaasSettings) -> OpenFaasPlatform:
        try:
            deployed = await asyncio.to_thread(preflight.inspect, settings)
        except JobError:
            if not settings.sizes_mb or (hold.starting and credentials() is not None):
                raise
            # A function that drives the run, or starts one of its trials: it may start others, but has no password for the
            # gateway's administration.
            return await OpenFaasPlatform.open(hold.run_dir, settings, channel=hold.channel, run=hold.run, limits=_known_limits(settings))
        if hold.starting:
            _check_fit(deployed, settings, hold.capacity)
            one = preflight.located_sizes(settings, deployed).of_size(hold.capacity.memory_mb)
            found = await asyncio.to_thread(preflight.inspect_one, one)
            await asyncio.to_thread(preflight.make_ready, one, found, replicas=hold.capacity.workers + SPARE)
        settings = preflight.located_sizes(settings, deployed)
        return await OpenFaasPlatform.open(hold.run_dir, settings, channel=hold.channel, run=hold.run, limits=deployed.limits)


def _known_limits(settings: OpenFaasSettings) -> Limits:
    """Limits of a deployment whose sizes and time limit are in a run's record."""
    sizes, lifetime_s = settings.sizes_mb, settings.lifetime_s or LIMITS.lifetime_s
    return dataclasses.replace(LIMITS, memory_min_mb=min(sizes), memory_max_mb=max(sizes), sizes_mb=sizes, lifetime_s=lifetime_s)


def _check_fit(deployed: preflight.DeployedFunction, settings: OpenFaasSettings, c: CapacityRequest) -> None:
    preflight.check_fit(deployed, settings, workers=c.workers, memory_mb=c.memory_mb, lifetime_s=c.lifetime_s, digest=digest())
