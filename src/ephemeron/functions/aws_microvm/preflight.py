"""Checks of the account and the image before a run begins; each refusal is one line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.async_invoke.sizes import function_of, not_deployed, sizes_in, sizes_text, text_of
from ephemeron.functions.aws_microvm.api import LaunchSpec
from ephemeron.functions.aws_microvm.platform import LIMITS
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, client, refused
from ephemeron.functions.base import Limits
from ephemeron.functions.direct_transports import ENDPOINT_VARIABLE
from ephemeron.functions.source_bundle import check_release, packages_in

COMMAND = "ephemeron cloud deploy aws-microvm"
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
        return f"{' and '.join(low)}; new accounts begin with reduced quotas: ask for more in Service Quotas" if low else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedImage:
    """The deployed image, or several that differ in their memory."""

    launch: LaunchSpec
    digest: str
    """Digest of its code; empty: unknown."""
    quotas: Quotas

    @property
    def memory_mb(self) -> int:
        """Baseline of runs that name none."""
        return self.launch.sizes_mb[0]

    @property
    def sizes_mb(self) -> tuple[int, ...]:
        """All baselines, the default first."""
        return self.launch.sizes_mb

    @property
    def limits(self) -> Limits:
        """Limits of calls."""
        sizes = self.sizes_mb
        return dataclasses.replace(
            LIMITS,
            memory_min_mb=min(sizes),
            memory_max_mb=max(sizes),
            sizes_mb=sizes,
            deploy=COMMAND,
            packages=packages_in(self.digest),
            concurrency=self.concurrency(min(sizes)),
        )

    def concurrency(self, memory_mb: int) -> int:
        """MicroVMs of a baseline at once: as many as the quota of memory has room for."""
        if self.quotas.memory_gb is None:
            return LIMITS.concurrency
        return int(self.quotas.memory_gb * 1024 // memory_mb)


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


def inspect(settings: AwsMicrovmSettings, *, tries: int = 6) -> DeployedImage:
    """Asks AWS about the images of all sizes; starts no MicroVM.

    Args:
        settings: located.
        tries: of each request.

    Raises:
        JobError: no credentials, expired or unknown ones, a missing permission, no such image, or one without an active
            version. Names the problem and the remedy.
    """
    first = _inspect_one(settings, settings.image, tries)
    sizes, versions = (first.memory_mb, *sizes_in(first.variables)[1:]), [first.version]
    for size in sizes[1:]:
        other = _inspect_one(settings, function_of(settings.image, sizes, size), tries)
        if (other.memory_mb, other.digest) != (size, first.digest):
            raise JobError(
                f"MicroVM image {settings.image!r} and that of {size} MB are not of one deployment",
                remedy=f"run: {COMMAND} --memory-mb {text_of(sizes)}",
            )
        versions.append(other.version)
    launch = LaunchSpec(
        image_arn=first.arn,
        sizes_mb=sizes,
        versions=tuple(versions),
        role=first.variables[ROLE],
        egress=(EGRESS.format(region=settings.region),),
        ingress=() if first.open else (NO_INGRESS.format(region=settings.region),),
        log_group=settings.log_group,
    )
    return DeployedImage(launch=launch, digest=first.digest, quotas=_quotas(settings, tries))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """One image."""

    arn: str
    version: str
    variables: Mapping[str, str]

    @property
    def memory_mb(self) -> int:
        return int(self.variables[MEMORY])

    @property
    def digest(self) -> str:
        return self.variables.get(DIGEST, "")

    @property
    def open(self) -> bool:
        """Whether its MicroVMs connect to each other's endpoints."""
        return self.variables.get(ENDPOINT_VARIABLE) == "1"


def _inspect_one(settings: AwsMicrovmSettings, name: str, tries: int) -> _Image:
    api = client(settings, tries=tries)

    def ask(action: str, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except Exception as e:
            raise refused(e, settings, doing=f"lambda:{action}") from e

    image = ask("ListMicrovmImages", lambda: find_image(api, name))
    if image is None:
        raise JobError(
            f"MicroVM image {name!r} in {settings.region} does not exist",
            remedy=f"run: {COMMAND} (or give --aws-microvm-image and --aws-microvm-region)",
        )
    number, arn = image.get("latestActiveImageVersion"), image["imageArn"]
    if number is None:
        raise JobError(
            f"MicroVM image {name!r} is {image['state'].lower()} and has no active version", remedy="wait for its build, or deploy again"
        )
    version = ask("GetMicrovmImageVersion", lambda: api.get_microvm_image_version(imageIdentifier=arn, imageVersion=number))
    variables = version.get("environmentVariables", {})
    if not {MEMORY, ROLE} <= variables.keys():
        raise JobError(f"MicroVM image {name!r} is not one of ephemeron", remedy=f"run: {COMMAND}")
    return _Image(arn=arn, version=str(number), variables=variables)


def _quotas(settings: AwsMicrovmSettings, tries: int) -> Quotas:
    """Quotas as they are applied to the account; unknown without the permission `servicequotas:GetServiceQuota`."""
    api = client(settings, "service-quotas", tries=min(tries, 3))

    def value(code: str) -> float | None:
        try:
            return float(api.get_service_quota(ServiceCode="lambda", QuotaCode=code)["Quota"]["Value"])
        except Exception:  # noqa: BLE001 - botocore makes its error classes at run time
            return None

    return Quotas(memory_gb=value(MEMORY_QUOTA), launches_s=value(LAUNCH_QUOTA))


def check_fit(deployed: DeployedImage, settings: AwsMicrovmSettings, *, workers: int, memory_mb: int, lifetime_s: float) -> None:
    """Whether a run fits the images: memory is theirs, not a call's.

    Raises:
        JobError: other memory, or a longer life.
        PlanInfeasible: binding is `concurrency`.
    """
    if memory_mb not in deployed.sizes_mb:
        raise JobError(
            f"MicroVM image {settings.image!r} has {sizes_text(deployed.sizes_mb)}, the run wants {memory_mb} MB",
            remedy=f"{not_deployed(deployed.sizes_mb, memory_mb, COMMAND)}; or leave --memory-mb out",
        )
    if lifetime_s > LIMITS.lifetime_s:
        raise JobError(
            f"MicroVMs end after eight hours, a call gets {LIMITS.lifetime_s:g} s, the run wants {lifetime_s:g} s",
            remedy=f"use --function-timeout-s {LIMITS.lifetime_s:g}",
        )
    if workers > deployed.concurrency(memory_mb):
        raise PlanInfeasible(
            f"{workers} workers of {memory_mb} MB are wanted, the quota of MicroVM memory in {settings.region} is "
            f"{deployed.quotas.memory_gb:g} GB, enough for {deployed.concurrency(memory_mb)}; use fewer workers, or ask AWS for more "
            "(Service Quotas, Lambda)",
            binding="concurrency",
        )


def check_code(deployed: DeployedImage, settings: AwsMicrovmSettings, digest: str) -> None:
    """Whether client and image are of the same release. An image of unknown code is trusted.

    Raises:
        JobError: they are not.
    """
    check_release(deployed.digest, digest, what=f"MicroVM image {settings.image!r}", deploying=COMMAND)


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
    endpoint = settings.endpoint or os.environ.get("AWS_ENDPOINT_URL_LAMBDA_MICROVMS") or os.environ.get("AWS_ENDPOINT_URL")
    return endpoint is not None and urlsplit(endpoint).hostname in _LOOPBACK
