"""Checks of the account and the image before a run begins; each refusal is one line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.aws_microvm.api import LaunchSpec
from ephemeron.functions.aws_microvm.platform import LIMITS
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, client, refused
from ephemeron.functions.base import Limits

DIGEST, MEMORY, ROLE, NAME = "EPHEMERON_CODE", "EPHEMERON_MEMORY_MB", "EPHEMERON_ROLE", "EPHEMERON_IMAGE"
"""Variables of the image: digest of its code, baseline, role of its MicroVMs, its own name."""
MEMORY_QUOTA, LAUNCH_QUOTA = "L-CD1C0CC4", "L-535CA9B6"
"""Codes of Service Quotas: GB of all MicroVMs together, and RunMicrovm requests each second."""
USUAL_MEMORY_GB, USUAL_LAUNCHES_S = 400.0, 5.0
"""Published defaults. New accounts begin below them."""
EGRESS = "arn:aws:lambda:{region}:aws:network-connector:aws-network-connector:INTERNET_EGRESS"
NO_INGRESS = "arn:aws:lambda:{region}:aws:network-connector:aws-network-connector:NO_INGRESS"
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "[::1]")
_PAGE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Quotas of the account; None: Service Quotas does not tell."""

    memory_gb: float | None
    launches_s: float | None

    @property
    def reduced(self) -> str:
        """Which quotas are below the published ones, and what to do; empty: none is known to be."""
        low = []
        if self.memory_gb is not None and self.memory_gb < USUAL_MEMORY_GB:
            low.append(f"{self.memory_gb:g} GB of memory of all MicroVMs (usually {USUAL_MEMORY_GB:g})")
        if self.launches_s is not None and self.launches_s < USUAL_LAUNCHES_S:
            low.append(f"{self.launches_s:g} starts a second (usually {USUAL_LAUNCHES_S:g})")
        return (
            f"{' and '.join(low)}; new accounts begin with reduced quotas: ask for more in Service Quotas"
            if low
            else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedImage:
    """The deployed image."""

    launch: LaunchSpec
    memory_mb: int
    digest: str
    """Digest of its code; empty: unknown."""
    quotas: Quotas

    @property
    def limits(self) -> Limits:
        """Limits of calls."""
        return dataclasses.replace(
            LIMITS, memory_min_mb=self.memory_mb, memory_max_mb=self.memory_mb, concurrency=self.concurrency
        )

    @property
    def concurrency(self) -> int:
        """MicroVMs at once: as many as the quota of memory has room for."""
        if self.quotas.memory_gb is None:
            return LIMITS.concurrency
        return int(self.quotas.memory_gb * 1024 // self.memory_mb)


def find_image(api: Any, name: str) -> dict[str, Any] | None:
    """Summary of the image of that name; None: there is none."""
    token: dict[str, str] = {}
    while True:
        page = api.list_microvm_images(nameFilter=name, maxResults=_PAGE, **token)
        for item in page["items"]:
            if item["name"] == name:
                return dict(item)
        if not page.get("nextToken"):
            return None
        token = {"nextToken": page["nextToken"]}


def inspect(settings: AwsMicrovmSettings) -> DeployedImage:
    """Asks AWS; starts no MicroVM.

    Args:
        settings: located.

    Raises:
        JobError: no credentials, expired or unknown ones, a missing permission, no such image, or one without an active
            version. Names the problem and the remedy.
    """
    api = client(settings, tries=6)

    def ask(action: str, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except Exception as e:
            raise refused(e, settings, doing=f"lambda:{action}") from e

    image = ask("ListMicrovmImages", lambda: find_image(api, settings.image))
    if image is None:
        raise JobError(
            f"MicroVM image {settings.image!r} in {settings.region} does not exist",
            remedy="run: ephemeron deploy aws-microvm (or give --aws-microvm-image and --aws-microvm-region)",
        )
    number, arn = image.get("latestActiveImageVersion"), image["imageArn"]
    if number is None:
        raise JobError(f"MicroVM image {settings.image!r} is {image['state'].lower()} and has no active version",
                       remedy="wait for its build, or deploy again")  # fmt: skip
    version = ask(
        "GetMicrovmImageVersion", lambda: api.get_microvm_image_version(imageIdentifier=arn, imageVersion=number)
    )
    told = version.get("environmentVariables", {})
    if not {MEMORY, ROLE} <= told.keys():
        raise JobError(
            f"MicroVM image {settings.image!r} is not one of ephemeron", remedy="run: ephemeron deploy aws-microvm"
        )
    launch = LaunchSpec(
        image_arn=arn, version=str(number), role=told[ROLE], egress=(EGRESS.format(region=settings.region),),
        ingress=(NO_INGRESS.format(region=settings.region),), log_group=settings.log_group,
    )  # fmt: skip
    return DeployedImage(
        launch=launch, memory_mb=int(told[MEMORY]), digest=told.get(DIGEST, ""), quotas=_quotas(settings)
    )


def _quotas(settings: AwsMicrovmSettings) -> Quotas:
    """Quotas as they are applied to the account; unknown without the permission `servicequotas:GetServiceQuota`."""
    api = client(settings, "service-quotas", tries=3)

    def value(code: str) -> float | None:
        try:
            return float(api.get_service_quota(ServiceCode="lambda", QuotaCode=code)["Quota"]["Value"])
        except Exception:  # noqa: BLE001 - botocore makes its error classes at run time
            return None

    return Quotas(memory_gb=value(MEMORY_QUOTA), launches_s=value(LAUNCH_QUOTA))


def check_fit(
    deployed: DeployedImage, settings: AwsMicrovmSettings, *, workers: int, memory_mb: int, lifetime_s: float
) -> None:
    """Whether a run fits the image: memory is the image's, not a call's.

    Raises:
        JobError: other memory, or a longer life.
        PlanInfeasible: binding is `concurrency`.
    """
    if memory_mb != deployed.memory_mb:
        raise JobError(
            f"MicroVM image {settings.image!r} has a baseline of {deployed.memory_mb} MB, the run wants {memory_mb} MB",
            remedy=f"run: ephemeron deploy aws-microvm --memory-mb {memory_mb}, or leave --memory-mb out",
        )
    if lifetime_s > LIMITS.lifetime_s:
        raise JobError(
            f"MicroVMs end after eight hours, a call gets {LIMITS.lifetime_s:g} s, the run wants {lifetime_s:g} s",
            remedy=f"use --function-timeout-s {LIMITS.lifetime_s:g}",
        )
    if workers > deployed.concurrency:
        raise PlanInfeasible(
            f"{workers} workers of {memory_mb} MB are wanted, the quota of MicroVM memory in {settings.region} is "
            f"{deployed.quotas.memory_gb:g} GB, enough for {deployed.concurrency}; use fewer workers, or ask AWS for more "
            "(Service Quotas, Lambda)",
            binding="concurrency",
        )


def check_code(deployed: DeployedImage, settings: AwsMicrovmSettings, digest: str) -> None:
    """Whether client and image are of the same release. An image of unknown code is trusted.

    Raises:
        JobError: they are not.
    """
    if deployed.digest and deployed.digest != digest:
        raise JobError(
            f"MicroVM image {settings.image!r} runs code {deployed.digest}, this is {digest}",
            remedy="run `ephemeron deploy aws-microvm` again, so that both are of one release",
        )


def check_channel(channel: str, settings: AwsMicrovmSettings) -> None:
    """Whether MicroVMs can reach it.

    Raises:
        JobError: it is on this machine.
    """
    parts = urlsplit(channel)
    if channel in ("folder", "parameter_server"):
        raise JobError(f"channel {channel!r} has no address that functions could be told", remedy="give a URL")
    here = parts.scheme == "file" or parts.hostname in _LOOPBACK
    if here and not is_local(settings):
        raise JobError(
            f"channel {channel!r} is on this machine, where MicroVMs cannot reach it",
            remedy="use s3://bucket/prefix, or a cache that the internet reaches (rediss://)",
        )


def is_local(settings: AwsMicrovmSettings) -> bool:
    """Whether the service is on loopback: then everything of this machine can be reached."""
    endpoint = (
        settings.endpoint or os.environ.get("AWS_ENDPOINT_URL_LAMBDA_MICROVMS") or os.environ.get("AWS_ENDPOINT_URL")
    )
    return endpoint is not None and urlsplit(endpoint).hostname in _LOOPBACK
