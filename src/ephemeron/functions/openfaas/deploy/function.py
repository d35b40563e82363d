"""Deployment of the function: its memory, timeouts, replicas, and retries of calls that have not been run.

Timeouts, from the inside out; each has to be longer than the one before, or a component gives up on a call that goes on:

    lifetime_s      the handler kills the call's process                         wanted
    exec_timeout    of-watchdog answers 504, and frees the replica for others    lifetime + LAST_WORD_S
    write_timeout   of-watchdog cuts the connection; grace when a replica goes   exec_timeout + 5 s
    upstream_timeout, write_timeout of the gateway, upstreamTimeout of the queue-worker   set by the cluster: see `gateway_values`

Retries: a call that failed has ended, and the run replaces it from its checkpoint; a second start by the queue would
only be a duplicate. Retried are 429 (busy) and 503 (no replica), after which a call has not been run.

Recipe of the image: of-watchdog in front of the handler, PyTorch for the CPU, and this release of ephemeron.

of-watchdog runs in HTTP mode: one handler process per replica. `max_inflight=1` makes it answer 429 while a call
runs, and its `/_/ready` not ready, so that a cluster that probes for readiness sends no second call there.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.sizes import FUNCTION, text_of
from ephemeron.functions.async_invoke.sizes import SIZES as SIZES_VARIABLE
from ephemeron.functions.openfaas.gateway import FunctionSpec
from ephemeron.functions.openfaas.platform import LIMITS
from ephemeron.functions.openfaas.preflight import CODE, LIFETIME, MEMORY, REPLICAS, SIZES, VCPUS
from ephemeron.functions.openfaas.settings import INSIDE, OpenFaasSettings
from ephemeron.functions.source_bundle import ENVIRONMENT_FILE, REQUIREMENTS, TRAINING, FunctionEnvironment, sources

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


# -- recipe of the image ------------------------------------------------------------------------------------------


WATCHDOG = "0.11.5"

DOCKERFILE = f"""\
# The function's image: of-watchdog, PyTorch for the CPU, and this release of ephemeron.
FROM --platform=${{{{TARGETPLATFORM:-linux/amd64}}}} ghcr.io/openfaas/of-watchdog:{WATCHDOG} AS watchdog
FROM --platform=${{{{TARGETPLATFORM:-linux/amd64}}}} docker.io/library/python:{{python}}-slim

COPY --from=watchdog /fwatchdog /usr/bin/fwatchdog
RUN chmod +x /usr/bin/fwatchdog && useradd --create-home --uid 1000 app
WORKDIR /home/app
COPY requirements.txt .
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -r requirements.txt
COPY ephemeron ./ephemeron
USER 1000

ENV PYTHONPATH=/home/app PYTHONUNBUFFERED=1
ENV fprocess="python3 -P -m ephemeron.functions.openfaas.handler"
ENV mode=http http_upstream_url=http://127.0.0.1:5000 ready_path=/ready max_inflight=1
ENV prefix_logs=false log_buffer_size=-1
# Timeouts follow the function's lifetime: `ephemeron cloud deploy openfaas` sets them.

EXPOSE 8080
HEALTHCHECK --interval=5s CMD [ -e /tmp/.lock ] || exit 1
CMD ["fwatchdog"]
"""

BUILD = """\
#!/bin/sh
# Builds the image and pushes it to a registry that the cluster can pull from: ./build.sh REGISTRY/NAME:TAG
set -eu
cd "$(dirname "$0")"
image=${1:?give a name such as ghcr.io/you/ephemeron:1}
docker build --platform linux/amd64 -t "$image" .
docker push "$image"
echo "pushed $image; now: ephemeron cloud deploy openfaas --image $image"
"""


KIT = ("testing/__init__.py", "testing/platform_entries.py")


def write_recipe(folder: Path, environment: FunctionEnvironment = FunctionEnvironment(), *, kit: bool = False) -> list[Path]:  # noqa: B008 - frozen
    """Dockerfile, requirements, code and `build.sh`; what lay there before is replaced.

    Args:
        folder: made when missing.
        kit: with the entries that the platform contract runs, for an image to try a cluster with.

    Raises:
        JobError: the folder cannot be written, or holds something else.
    """
    others = {path.name for path in folder.iterdir()} - {ENVIRONMENT_FILE} if folder.is_dir() else set()
    if others and not (folder / "Dockerfile").exists():
        raise JobError(f"folder {folder} holds something else", remedy="give an empty one with --out")
    written = {
        "Dockerfile": DOCKERFILE.format(python=environment.version),
        "requirements.txt": environment.requirements([*REQUIREMENTS, *TRAINING]),
        "build.sh": BUILD,
    }
    try:
        shutil.rmtree(folder / "ephemeron", ignore_errors=True)
        root = Path(__file__).parents[3]
        for name, path in [*sources(), *((name, root / name) for name in KIT if kit)]:
            target = folder / "ephemeron" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        for name, text in written.items():
            (folder / name).write_text(text)
        (folder / "build.sh").chmod(0o755)
    except OSError as e:
        raise JobError(f"cannot write the image's recipe to {folder}: {e.strerror}") from None
    return [folder / name for name in written]
