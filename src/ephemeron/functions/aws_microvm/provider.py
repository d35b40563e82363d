"""Provider for AWS Lambda MicroVMs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

from ephemeron.functions.async_invoke.provider import CapacityRequest, Provider, RunHandle
from ephemeron.functions.async_invoke.sizes import sizes_text
from ephemeron.functions.aws.settings import identity
from ephemeron.functions.aws_microvm import preflight
from ephemeron.functions.aws_microvm.platform import LIMITS, AwsMicrovmPlatform
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings
from ephemeron.functions.base import Limits
from ephemeron.functions.source_bundle import digest


class AwsMicrovm(Provider[AwsMicrovmSettings]):
    name, title, settings = "aws-microvm", "AWS Lambda MicroVMs", AwsMicrovmSettings
    cold_start_s = 5.0
    """The imports are made in the snapshot; the time includes a repeated request."""
    suspendable = True
    extra, module = "aws", "boto3"
    needs = "an account; then: ephemeron cloud deploy aws-microvm"
    limits_from = "limits of the service; the image's baseline narrows them"

    @property
    def limits(self) -> Limits:
        return LIMITS

    def inspect(self, settings: AwsMicrovmSettings, channel: str, secrets: dict[str, str]) -> Iterator[str]:
        yield f"region {settings.region}" + (f", endpoint {settings.endpoint}" if settings.endpoint else "")
        yield f"credentials {identity(settings.aws)}"
        if channel:
            preflight.check_channel(channel, settings)
            yield f"channel {channel} can be reached from there, by its address"
        found = preflight.inspect(settings)
        yield (
            f"image {settings.image}: baselines of {sizes_text(found.sizes_mb)}, one vCPU for {LIMITS.mb_per_vcpu:g} MB, "
            f"calls of up to {LIMITS.lifetime_s:g} s"
        )
        preflight.check_code(found, settings, digest())
        yield f"its code is of this release ({found.digest})" if found.digest else "the code that it runs is unknown"
        gb = found.quotas.memory_gb
        yield (
            "quota: not known (servicequotas:GetServiceQuota is not allowed)"
            if gb is None
            else (f"quota: {gb:g} GB of MicroVMs, {found.concurrency(found.memory_mb)} of {found.memory_mb} MB at once")
        )
        if found.quotas.reduced:
            yield f"reduced quota: {found.quotas.reduced}"

    def sizes(self, settings: AwsMicrovmSettings) -> tuple[int, ...]:
        return preflight.inspect(settings, tries=1).sizes_mb

    def logs(self, settings: AwsMicrovmSettings) -> str:
        return f"aws logs tail {settings.log_group} --region {settings.region} --since 10m"

    def admit(self, c: CapacityRequest, settings: AwsMicrovmSettings, secrets: dict[str, str]) -> tuple[CapacityRequest, Limits]:
        preflight.check_channel(c.channel, settings)
        deployed = preflight.inspect(settings)
        preflight.check_code(deployed, settings, digest())
        c = dataclasses.replace(c, memory_mb=c.memory_mb or deployed.memory_mb, lifetime_s=c.lifetime_s or LIMITS.lifetime_s)
        preflight.check_fit(deployed, settings, workers=c.workers, memory_mb=c.memory_mb, lifetime_s=c.lifetime_s)
        return c, deployed.limits

    async def open(self, hold: RunHandle, settings: AwsMicrovmSettings) -> AwsMicrovmPlatform:
        deployed = await asyncio.to_thread(preflight.inspect, settings)
        if hold.starting:
            preflight.check_code(deployed, settings, digest())
        return await AwsMicrovmPlatform.open(
            hold.run_dir, settings, deployed.launch, channel=hold.channel, run=hold.run, limits=deployed.limits
        )
