"""Checks of the gateway and the function before a run begins; each refusal is one line."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ephemeron.errors import GatewayError, JobError, PlanInfeasible
from ephemeron.functions.async_invoke.sizes import function_of, not_deployed, sizes_text, text_of
from ephemeron.functions.base import Limits
from ephemeron.functions.openfaas.gateway import Gateway, refused
from ephemeron.functions.openfaas.platform import LIMITS
from ephemeron.functions.openfaas.settings import OpenFaasSettings, credentials
from ephemeron.functions.source_bundle import check_release, packages_in

MEMORY, LIFETIME, REPLICAS, CODE, VCPUS, SIZES = (
    "ephemeron.memory-mb",
    "ephemeron.lifetime-s",
    "ephemeron.replicas",
    "ephemeron.code",
    "ephemeron.vcpus",
    "ephemeron.sizes",
)
"""Annotations in which `cloud deploy` describes the function."""
COMMAND = "ephemeron cloud deploy openfaas"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SETTLE_S, _POLL_S = 180.0, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedFunction:
    """The deployed function, or several that differ in their memory."""

    image: str
    memory_mb: int
    """Memory of runs that name none."""
    vcpus: float
    lifetime_s: float
    replicas: int
    """Maximum: concurrent calls."""
    running: int
    """Replicas wanted at this moment."""
    available: int
    digest: str
    sizes_mb: tuple[int, ...]
    """All memory sizes, the default first."""

    @property
    def limits(self) -> Limits:
        """Limits of calls."""
        return dataclasses.replace(
            LIMITS,
            memory_min_mb=min(self.sizes_mb),
            memory_max_mb=max(self.sizes_mb),
            sizes_mb=self.sizes_mb,
            lifetime_s=self.lifetime_s,
            mb_per_vcpu=self.memory_mb / self.vcpus,
            concurrency=self.replicas,
            deploy=COMMAND,
            packages=packages_in(self.digest),
        )


def gateway_of(settings: OpenFaasSettings) -> Gateway:
    """A client with the credentials of the environment."""
    return Gateway(settings, credentials())


def gateway_of_one(settings: OpenFaasSettings, function: str) -> Gateway:
    """The same, for a function of that name."""
    return gateway_of(dataclasses.replace(settings, function=function, sizes_mb=()))


def functions_of(settings: OpenFaasSettings) -> list[str]:
    """Names of the functions of a deployment, the first size's last; empty: there is none.

    Raises:
        GatewayError: the gateway does not answer, or refuses.
    """
    try:
        notes = gateway_of(settings).function().annotations
    except GatewayError as e:
        if e.status == 404:
            return []
        raise
    sizes = _sizes(notes, 0)
    return [*(function_of(settings.function, sizes, size) for size in sizes[1:]), settings.function]


def inspect(settings: OpenFaasSettings) -> DeployedFunction:
    """Asks the gateway about the functions of all sizes; starts none.

    Args:
        settings: located.

    Raises:
        JobError: the gateway cannot be reached, refuses the password, does not know the function, or the function is not
            of this package. Names the problem and the remedy.
    """
    first = inspect_one(settings)
    settings = located_sizes(settings, first)
    found = [first, *(inspect_one(settings.of_size(size)) for size in first.sizes_mb[1:])]
    for size, other in zip(first.sizes_mb, found, strict=True):
        if (other.memory_mb, other.digest) != (size, first.digest):
            raise JobError(
                f"function {settings.function!r} and that of {size} MB are not of one deployment",
                remedy=f"run: {COMMAND} --memory-mb {text_of(first.sizes_mb)}",
            )
    return dataclasses.replace(first, lifetime_s=min(f.lifetime_s for f in found), replicas=min(f.replicas for f in found))


def located_sizes(settings: OpenFaasSettings, deployed: DeployedFunction) -> OpenFaasSettings:
    """The settings with the sizes that are deployed."""
    return dataclasses.replace(settings, sizes_mb=deployed.sizes_mb)


def inspect_one(settings: OpenFaasSettings) -> DeployedFunction:
    """One function, with the sizes of its deployment.

    Raises:
        JobError: as `inspect`.
    """
    gateway = gateway_of(settings)
    try:
        gateway.info()
        status = gateway.function()
    except GatewayError as e:
        raise refused(e, settings, doing="asking about") from e
    notes = status.annotations
    try:
        memory_mb = int(notes[MEMORY])
        return DeployedFunction(
            image=status.image,
            memory_mb=memory_mb,
            sizes_mb=_sizes(notes, memory_mb),
            vcpus=float(notes[VCPUS]),
            lifetime_s=float(notes[LIFETIME]),
            replicas=int(notes[REPLICAS]),
            running=status.replicas,
            available=status.available,
            digest=notes.get(CODE, ""),
        )
    except (KeyError, ValueError):
        raise JobError(
            f"function {settings.function!r} (image {status.image}) was not deployed by ephemeron",
            remedy="give another --openfaas-function, or run: ephemeron cloud deploy openfaas",
        ) from None


def _sizes(notes: Mapping[str, str], memory_mb: int) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in notes.get(SIZES, "").split(",") if size)
    return sizes or (memory_mb,)


def check_fit(
    deployed: DeployedFunction, settings: OpenFaasSettings, *, workers: int, memory_mb: int, lifetime_s: float, digest: str
) -> None:
    """Whether a run fits the function: memory, time limit and replicas are the function's, not a call's.

    Raises:
        JobError: other memory, a longer time limit, or code of another release.
        PlanInfeasible: binding is `concurrency`.
    """
    name = settings.function
    if memory_mb not in deployed.sizes_mb:
        raise JobError(
            f"function {name!r} has {sizes_text(deployed.sizes_mb)}, the run wants {memory_mb} MB",
            remedy=f"{not_deployed(deployed.sizes_mb, memory_mb, COMMAND)}; or leave --memory-mb out",
        )
    if lifetime_s > deployed.lifetime_s:
        raise JobError(
            f"function {name!r} ends after {deployed.lifetime_s:g} s, the run wants {lifetime_s:g} s",
            remedy=f"use --function-timeout-s {deployed.lifetime_s:g}, or: ephemeron cloud deploy openfaas --function-timeout-s {lifetime_s:g}",
        )
    check_release(deployed.digest, digest, what=f"function {name!r}", deploying=COMMAND)
    if workers > deployed.replicas:
        raise PlanInfeasible(
            f"{workers} workers are wanted, function {name!r} may have {deployed.replicas} replicas, and each runs one call; "
            f"use fewer workers, or run: ephemeron cloud deploy openfaas --replicas {workers + 1}",
            binding="concurrency",
        )


def check_channel(channel: str, settings: OpenFaasSettings, secrets: dict[str, str]) -> None:
    """Whether functions elsewhere can reach it.

    Raises:
        JobError: it is on this machine, or needs credentials that functions do not have.
    """
    parts = urlsplit(channel)
    if channel in ("folder", "parameter_server"):
        raise JobError(f"channel {channel!r} has no address that functions could be told", remedy="give a URL")
    here = parts.scheme == "file" or parts.hostname in _LOOPBACK
    if here and urlsplit(settings.gateway).hostname not in _LOOPBACK:
        raise JobError(
            f"channel {channel!r} is on this machine, where functions of the cluster cannot reach it",
            remedy="use s3://bucket/prefix, or redis://HOST:PORT of a service that the cluster can reach",
        )
    if secrets:
        raise JobError(
            "functions do not get credentials from an address",
            remedy="set EPHEMERON_CHANNEL_PASSWORD and run: ephemeron cloud deploy openfaas",
        )


def make_ready(
    settings: OpenFaasSettings,
    deployed: DeployedFunction,
    *,
    replicas: int,
    limit_s: float = _SETTLE_S,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Scales up to the replicas of a run, waits for them, and checks their handler.

    Args:
        deployed: as `inspect` found it.
        replicas: wanted at least.
        limit_s: longest wait.

    Raises:
        JobError: replicas do not come up (the image is wrong, or the cluster is full), or the answer is not of this handler.
    """
    gateway = gateway_of(settings)
    wanted = min(replicas, deployed.replicas)
    end = clock() + limit_s
    try:
        if deployed.running < wanted:
            gateway.scale(wanted)
        while (status := gateway.function()).available < wanted:
            if clock() >= end:
                raise _not_there(settings, deployed, status.available, wanted, limit_s)
            pause(_POLL_S)
        _check_about(gateway, settings, deployed)
    except GatewayError as e:
        raise refused(e, settings, doing="preparing") from e


def _not_there(settings: OpenFaasSettings, deployed: DeployedFunction, available: int, wanted: int, limit_s: float) -> JobError:
    if available:
        return JobError(
            f"only {available} of {wanted} replicas of function {settings.function!r} have started within {limit_s:g} s",
            remedy="the cluster may lack room: use fewer workers or less memory, or see: kubectl get events -n openfaas-fn",
        )
    return JobError(
        f"no replica of function {settings.function!r} has started within {limit_s:g} s; is its image right? ({deployed.image})",
        remedy="see: kubectl describe pod -n openfaas-fn; then build, push and run `ephemeron cloud deploy openfaas` again",
    )


def _check_about(gateway: Gateway, settings: OpenFaasSettings, deployed: DeployedFunction) -> None:
    reply = gateway.invoke(b"", path="/about", method="GET")
    try:
        about = json.loads(reply.body)
    except ValueError:
        about = None
    if reply.status == 429:
        return  # busy with a call, which only this handler answers so: another run trains here
    if not isinstance(about, dict) or about.get("ephemeron") != 1:
        raise JobError(
            f"image {deployed.image} of function {settings.function!r} does not hold ephemeron's handler: it answers "
            f"{reply.status}{': ' + reply.text() if reply.text() else ''}",
            remedy="build the recipe that `ephemeron cloud deploy openfaas` writes, push it, and deploy with --image",
        )
    if deployed.digest and about.get("code") != deployed.digest:
        raise JobError(
            f"a replica of function {settings.function!r} still runs code {about.get('code')}, deployed is {deployed.digest}",
            remedy="wait until the update is through, or deploy again",
        )
