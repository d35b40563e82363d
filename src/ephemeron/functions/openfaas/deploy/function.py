"""Deployment of the function: its memory, timeouts, replicas, and retries of calls that have not been run.

Timeouts, from the inside out; each has to be longer than the one before, or a component gives up on a call that goes on:

    lifetime_s      the handler kills the call's process                         wanted
    exec_timeout    of-watchdog answers 504, and frees the replica for others    lifetime + LAST_WORD_S
    write_timeout   of-watchdog cuts the connection; grace when a replica goes   exec_timeout + 5 s
    upstream_timeout, write_timeout of the gateway, upstreamTimeout of the queue-worker   set by the cluster: see `gateway_values`

Retries: a call that failed has ended, and the run replaces it from its checkpoint; a second start by the queue would
only be a duplicate. Retried are 429 (busy) and 503 (no replica), after which a call has not been run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.sizes import FUNCTION, text_of
from ephemeron.functions.async_invoke.sizes import SIZES as SIZES_VARIABLE
from ephemeron.functions.openfaas.gateway import FunctionSpec
from ephemeron.functions.openfaas.platform import LIMITS
from ephemeron.functions.openfaas.preflight import CODE, LIFETIME, MEMORY, REPLICAS, SIZES, VCPUS
from ephemeron.functions.openfaas.settings import INSIDE, OpenFaasSettings

LAST_WORD_S = 30.0
"""Time for an outcome to reach a slow store."""
_THEN_S = 5.0
_RETRY = {
    "com.openfaas.retry.attempts": "100",
    "com.openfaas.retry.codes": "429,503",
    "com.openfaas.retry.min_wait": "1s",
    "com.openfaas.retry.max_wait": "4s",
}
_READY = {"com.openfaas.ready.http.path": "/_/ready", "com.openfaas.ready.http.periodSeconds": "2s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """The function to deploy."""

    image: str
    memory_mb: int
    """Memory of a replica; the handler's own 60 MB are part of it."""
    lifetime_s: float = 900.0
    replicas: int = 5
    """At most. A worker takes one, and a successor another one for a moment."""
    cpus: float = 0.0
    """0: in proportion to memory, as on AWS Lambda."""
    inside: str = INSIDE
    """The gateway's URL, as functions reach it."""
    secrets: Sequence[str] = ()
    """Names of OpenFaaS secrets, of those that the handler knows."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables. Nothing secret: the gateway shows them."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """More labels of the function's replicas."""
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.image.strip():
            raise JobError("a function needs an image", remedy="build the recipe and give --image REGISTRY/NAME:TAG")
        if not 128 <= self.memory_mb <= LIMITS.memory_max_mb:
            raise JobError(f"memory of {self.memory_mb} MB is outside 128 to {LIMITS.memory_max_mb} MB")
        if not 1 <= self.lifetime_s <= LIMITS.lifetime_s:
            raise JobError(f"a lifetime of {self.lifetime_s:g} s is outside 1 to {LIMITS.lifetime_s:g} s")
        if not 1 <= self.replicas <= LIMITS.concurrency:
            raise JobError(f"{self.replicas} replicas are outside 1 to {LIMITS.concurrency}")
        if self.cpus < 0 or not math.isfinite(self.cpus):
            raise JobError(f"{self.cpus} CPUs cannot be had")

    @property
    def vcpus(self) -> float:
        """CPU limit of a replica, in cores, to the millicore."""
        return max(0.001, round(self.cpus or LIMITS.vcpus(self.memory_mb), 3))

    @property
    def exec_timeout_s(self) -> float:
        """Time after which of-watchdog ends a call."""
        return self.lifetime_s + LAST_WORD_S


def specs_of(wanted: DeploymentSpec, settings: OpenFaasSettings, sizes_mb: Sequence[int]) -> list[FunctionSpec]:
    """Requests to the gateway: one function per memory size, that of the first size last, since it tells clients of the others.

    Raises:
        JobError: a size is out of bounds, or CPUs are given for several sizes.
    """
    if wanted.cpus and len(sizes_mb) > 1:
        raise JobError("--cpus does not fit several memory sizes", remedy="leave it out: CPUs are in proportion to memory")
    settings = replace(settings, sizes_mb=tuple(sizes_mb))
    return [spec_of(replace(wanted, memory_mb=size), settings) for size in reversed(sizes_mb)]


def spec_of(wanted: DeploymentSpec, settings: OpenFaasSettings) -> FunctionSpec:
    """Request to the gateway for the function of one memory size; the settings name all sizes."""
    exec_s = wanted.exec_timeout_s
    told = {
        "EPHEMERON_MEMORY_MB": str(wanted.memory_mb),
        "EPHEMERON_VCPUS": f"{wanted.vcpus:g}",
        "EPHEMERON_LIFETIME_S": f"{wanted.lifetime_s:g}",
        "EPHEMERON_CODE": wanted.digest,
        "EPHEMERON_GATEWAY": wanted.inside,
        FUNCTION: settings.function,
        "EPHEMERON_NAMESPACE": settings.namespace,
        "exec_timeout": duration(exec_s),
        "write_timeout": duration(exec_s + _THEN_S),
        "read_timeout": duration(exec_s + _THEN_S),
        "healthcheck_interval": "5s",
    }
    if len(settings.sizes_mb) > 1:
        told[SIZES_VARIABLE] = text_of(settings.sizes_mb)
    notes = {
        SIZES: text_of(settings.sizes_mb or (wanted.memory_mb,)),
        MEMORY: str(wanted.memory_mb),
        VCPUS: f"{wanted.vcpus:g}",
        LIFETIME: f"{wanted.lifetime_s:g}",
        REPLICAS: str(wanted.replicas),
        CODE: wanted.digest,
        **_RETRY,
        **_READY,
    }
    labels = {
        **wanted.labels,
        "com.openfaas.scale.min": "1",
        "com.openfaas.scale.max": str(wanted.replicas),
        "com.openfaas.scale.type": "capacity",
        "com.openfaas.scale.target": "1",
    }
    return FunctionSpec(
        service=settings.of_size(wanted.memory_mb).function,
        image=wanted.image,
        namespace=settings.namespace,
        labels=labels,
        annotations=notes,
        variables={**wanted.variables, **told},
        secrets=tuple(wanted.secrets),
        memory_mb=wanted.memory_mb,
        cpus=wanted.vcpus,
    )


def gateway_values(wanted: DeploymentSpec) -> str:
    """Values of the OpenFaaS chart whose timeouts exceed those of the function."""
    upstream = wanted.exec_timeout_s + _THEN_S
    outer = duration(upstream + _THEN_S)
    return (
        f"gateway:\n  upstreamTimeout: {duration(upstream)}\n  readTimeout: {outer}\n  writeTimeout: {outer}\n"
        f"jetstreamQueueWorker:\n  maxInflight: {wanted.replicas}\n"
    )


def duration(seconds: float) -> str:
    """A duration for Go: whole seconds, rounded up."""
    return f"{math.ceil(seconds)}s"
