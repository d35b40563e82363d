"""Provider for AWS Lambda."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator

from ephemeron.functions.async_invoke.provider import CapacityRequest, Provider, RunHandle
from ephemeron.functions.async_invoke.sizes import sizes_text
from ephemeron.functions.aws import preflight
from ephemeron.functions.aws.platform import LIMITS, AwsPlatform
from ephemeron.functions.aws.settings import AwsSettings, identity
from ephemeron.functions.base import Limits
from ephemeron.functions.source_bundle import digest


class AwsLambda(Provider[AwsSettings]):
    name, title, settings = "aws", "AWS Lambda", AwsSettings
    cold_start_s = 10.0
    extra, module = "aws", "boto3"
    needs = "an account; then: ephemeron cloud deploy aws"
    limits_from = "AWS Lambda's quotas; the function's own narrow them"

    @property
    def limits(self) -> Limits:
        return LIMITS

    def inspect(self, settings: AwsSettings, channel: str, secrets: dict[str, str]) -> Iterator[str]:
        yield f"region {settings.region}" + (f", endpoint {settings.endpoint}" if settings.endpoint else "")
        yield f"credentials {identity(settings)}"
        if channel:
            preflight.check_channel(channel, settings, secrets)
            yield f"channel {channel} can be reached from there, by its address"
        found = preflight.inspect(settings)
        yield (
            f"function {settings.function}: {sizes_text(found.sizes_mb)}, {found.timeout_s} s, no retries, recursion allowed; "
            "it may be asked about and invoked"
        )
        preflight.check_code(found, settings, digest())
        yield f"its code is of this release ({found.digest})" if found.digest else "the code that it runs is unknown"
        if (managed := found.managed) is not None:
            yield (
                f"on managed instances of {managed.provider}: {managed.calls} calls in an environment, "
                f"{managed.gib_per_vcpu:g} GiB per vCPU; instances are billed, not calls"
            )
        yield f"quota: {found.concurrency} functions at once"
        if found.reduced:
            yield f"reduced quota: {found.reduced}"

    def sizes(self, settings: AwsSettings) -> tuple[int, ...]:
        return preflight.inspect(settings, tries=1).sizes_mb

    def recorded(self, settings: AwsSettings, limits: Limits) -> AwsSettings:
        return dataclasses.replace(settings, sizes_mb=limits.sizes_mb)

    def logs(self, settings: AwsSettings) -> str:
        at = f" --endpoint-url {settings.endpoint}" if settings.endpoint else ""
        return f"aws logs tail {settings.log_group} --region {settings.region}{at} --since 10m"

    def admit(self, c: CapacityRequest, settings: AwsSettings, secrets: dict[str, str]) -> tuple[CapacityRequest, Limits]:
        preflight.check_channel(c.channel, settings, secrets)
        deployed = preflight.inspect(settings)
        preflight.check_code(deployed, settings, digest())
        c = dataclasses.replace(c, memory_mb=c.memory_mb or deployed.memory_mb, lifetime_s=c.lifetime_s or float(deployed.timeout_s))
        preflight.check_fit(deployed, settings, workers=c.workers, memory_mb=c.memory_mb, lifetime_s=c.lifetime_s)
        return c, deployed.limits

    async def open(self, hold: RunHandle, settings: AwsSettings) -> AwsPlatform:
        deployed = await asyncio.to_thread(preflight.inspect, settings)
        if hold.starting:
            preflight.check_code(deployed, settings, digest())
        return await AwsPlatform.open(
            hold.run_dir,
            preflight.located_sizes(settings, deployed),
            channel=hold.channel,
            run=hold.run,
            limits=deployed.limits,
            logs_since=hold.since,
        )
