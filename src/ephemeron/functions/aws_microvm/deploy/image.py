"""Creation and update of the image. A build takes minutes; its hooks say when the imports are made.

The code artifact: a ZIP with a Dockerfile at its root, from which Lambda builds the image and takes its snapshot.

PyTorch is imported in the snapshot, so that a MicroVM starts with the imports made. Nothing of a run is in it: no variable of
the environment is secret, and no random state is used before the run hook.
"""

from __future__ import annotations

import io
import os
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ephemeron.errors import JobError
from ephemeron.functions import source_bundle
from ephemeron.functions.async_invoke.sizes import SIZES, function_of, text_of
from ephemeron.functions.aws_microvm.handler import PORT
from ephemeron.functions.aws_microvm.preflight import DIGEST, EGRESS, MEMORY, NAME, ROLE
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, refused
from ephemeron.functions.source_bundle import FunctionEnvironment

BASELINES_MB = (512, 1024, 2048, 4096, 8192)
BASE_IMAGE = "arn:aws:lambda:{region}:aws:microvm-image:al2023-1"
READY_S, HOOK_S = 900, 60
_BUILD_S = 3_600.0
_GOOD = {"CREATED", "UPDATED"}
_BAD = {"CREATE_FAILED", "UPDATE_FAILED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """The image to deploy."""

    artifact: str
    """`s3://` URI of the ZIP."""
    build_role: str
    """ARN of the role that the build reads it with."""
    role: str
    """ARN of the role that MicroVMs run as."""
    memory_mb: int
    """Baseline of a MicroVM."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables. They are in the snapshot, so no secrets."""
    digest: str = ""


def check_sizes(sizes_mb: Sequence[int]) -> None:
    """Raises `JobError` unless all of them are baselines of MicroVMs."""
    for size in sizes_mb:
        if size not in BASELINES_MB:
            raise JobError(f"memory of {size} MB is no baseline of MicroVMs", remedy=f"use some of {', '.join(map(str, BASELINES_MB))}")


def deploy(
    client: Any,
    settings: AwsMicrovmSettings,
    wanted: ImageSpec,
    sizes_mb: Sequence[int],
    *,
    every_s: float = 5.0,
    told: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, str]:
    """Creates one image per memory size, or a new version of it; waits for the builds, and deletes images of sizes that are
    not wanted.

    Args:
        client: of boto3.
        settings: names the first size's image; located.
        wanted: what they have in common; its memory is ignored.
        sizes_mb: the first is the default of runs.
        every_s: seconds between two looks at the builds.
        told: takes each state of a build.
        clock: seconds.

    Returns:
        Name of each image, and `created`, `updated` or `deleted`.

    Raises:
        JobError: AWS refuses, or a build fails, in one line.
    """
    before = images_of(client, settings)
    more = {SIZES: text_of(sizes_mb)} if len(sizes_mb) > 1 else {}
    done, builds = dict[str, str](), list[tuple[str, str]]()
    for size in reversed(sizes_mb):  # the first size's image last: it tells clients of the others
        name = function_of(settings.image, sizes_mb, size)
        one = replace(wanted, memory_mb=size, variables={**wanted.variables, **more})
        doing = "lambda:CreateMicrovmImage" if name not in before else "lambda:UpdateMicrovmImage"
        try:
            if name in before:
                made = client.update_microvm_image(imageIdentifier=before[name], **_request(settings, one))
            else:
                made = client.create_microvm_image(name=name, **_request(settings, one))
        except Exception as e:
            raise refused(e, settings, doing=doing) from e
        builds.append((str(made["imageArn"]), str(made["imageVersion"])))
        done[name] = "updated" if name in before else "created"
    try:
        for arn, version in builds:
            _wait(client, arn, version, every_s=every_s, told=told, clock=clock)
        for name in [name for name in before if name not in done]:
            client.delete_microvm_image(imageIdentifier=before[name])
            done[name] = "deleted"
    except Exception as e:
        raise refused(e, settings, doing="lambda:GetMicrovmImage") from e
    return done


def images_of(client: Any, settings: AwsMicrovmSettings) -> dict[str, str]:
    """Images of a deployment in all its sizes: name to ARN; empty: there is none.

    Raises:
        JobError: AWS refuses, in one line.
    """
    names = {settings.image, *(f"{settings.image}-{mb}" for mb in BASELINES_MB)}
    try:
        pages = client.get_paginator("list_microvm_images").paginate(nameFilter=settings.image)
        return {i["name"]: str(i["imageArn"]) for page in pages for i in page["items"] if i["name"] in names}
    except Exception as e:
        raise refused(e, settings, doing="lambda:ListMicrovmImages") from e


def _wait(client: Any, arn: str, version: str, *, every_s: float, told: Callable[[str], None], clock: Callable[[], float]) -> None:
    end, last = clock() + _BUILD_S, ""
    while clock() < end:
        state = str(client.get_microvm_image(imageIdentifier=arn)["state"])
        if state != last:
            told(f"image {arn.rpartition(':')[2]}, version {version}: {state.lower()}")
        last = state
        if state in _GOOD:
            return
        if state in _BAD:
            found = client.get_microvm_image_version(imageIdentifier=arn, imageVersion=version)
            raise JobError(
                f"the build of version {version} failed: {found.get('stateReason', 'no reason was given')}",
                remedy=f"see the log group /aws/lambda-microvms/{arn.rpartition(':')[2]}",
            )
        time.sleep(every_s)
    raise JobError(f"the build of version {version} takes longer than {_BUILD_S / 60:.0f} minutes", remedy="look at it in the console")


def _request(settings: AwsMicrovmSettings, wanted: ImageSpec) -> dict[str, object]:
    on = dict.fromkeys(("run", "suspend", "resume", "terminate"), "ENABLED")
    limits = {f"{name}TimeoutInSeconds": HOOK_S for name in on}
    return {
        "baseImageArn": BASE_IMAGE.format(region=settings.region),
        "buildRoleArn": wanted.build_role,
        "codeArtifact": {"uri": wanted.artifact},
        "resources": [{"minimumMemoryInMiB": wanted.memory_mb}],
        "cpuConfigurations": [{"architecture": "ARM_64"}],
        "egressNetworkConnectors": [EGRESS.format(region=settings.region)],
        "description": "Trains models for ephemeron; run by `ephemeron train --platform aws-microvm`.",
        "logging": {"cloudWatch": {"logGroup": settings.log_group}},
        "environmentVariables": {
            **wanted.variables,
            DIGEST: wanted.digest,
            MEMORY: str(wanted.memory_mb),
            ROLE: wanted.role,
            NAME: settings.image,
        },
        "hooks": {
            "port": PORT,
            "microvmHooks": {**on, **limits},
            "microvmImageHooks": {
                "ready": "ENABLED",
                "readyTimeoutInSeconds": READY_S,
                "validate": "ENABLED",
                "validateTimeoutInSeconds": HOOK_S,
            },
        },
    }


# -- the code artifact --------------------------------------------------------------------------------------------


REQUIREMENTS = ("boto3>=1.44", "websockets>=15", *source_bundle.REQUIREMENTS)
_STAMP = (1980, 1, 1, 0, 0, 0)

DOCKERFILE = """\
# The image of a MicroVM (arm64): AWS's base, PyTorch for the CPU, and this release of ephemeron.
FROM public.ecr.aws/lambda/microvms:al2023-minimal
RUN dnf install -y python{python} python{python}-pip && dnf clean all
WORKDIR /app
COPY requirements.txt .
RUN python{python} -m pip install --no-cache-dir -r requirements.txt
COPY ephemeron ephemeron
ENV PYTHONPATH=/app PYTHONUNBUFFERED=1
EXPOSE {port}
CMD ["python{python}", "-m", "ephemeron.functions.aws_microvm.handler"]
"""


def build_artifact(environment: FunctionEnvironment = FunctionEnvironment()) -> bytes:  # noqa: B008 - frozen
    """The ZIP, the same bytes each time."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes, mode: int) -> None:
            entry = zipfile.ZipInfo(name, _STAMP)
            entry.external_attr = mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)

        add("Dockerfile", DOCKERFILE.format(python=environment.version, port=PORT).encode(), 0o644)
        add("requirements.txt", environment.requirements([*REQUIREMENTS, *source_bundle.TRAINING]).encode(), 0o644)
        for name, path in source_bundle.sources():
            add(f"ephemeron/{name}", path.read_bytes(), 0o755 if os.access(path, os.X_OK) else 0o644)
    return out.getvalue()


def write_artifact(path: Path, environment: FunctionEnvironment) -> bytes:
    """Writes the ZIP, and returns it.

    Raises:
        JobError: it cannot be written.
    """
    data = build_artifact(environment)
    try:
        path.write_bytes(data)
    except OSError as e:
        raise JobError(f"cannot write the image's code to {path}: {e.strerror}") from None
    return data
