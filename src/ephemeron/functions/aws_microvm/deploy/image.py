"""Creation and update of the image. A build takes minutes; its hooks say when the imports are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ephemeron.errors import JobError
from ephemeron.functions.aws_microvm.handler import PORT
from ephemeron.functions.aws_microvm.preflight import DIGEST, EGRESS, MEMORY, NAME, ROLE, find_image
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, refused

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

    def __post_init__(self) -> None:
        if self.memory_mb not in BASELINES_MB:
            raise JobError(
                f"memory of {self.memory_mb} MB is no baseline of MicroVMs",
                remedy=f"use one of {', '.join(map(str, BASELINES_MB))}",
            )


def deploy(
    client: Any, settings: AwsMicrovmSettings, wanted: ImageSpec, *, every_s: float = 5.0,
    told: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.monotonic,
) -> str:  # fmt: skip
    """Creates the image, or a new version of it, and waits for its build. Returns `created` or `updated`.

    Args:
        client: of boto3.
        settings: which image; located.
        wanted: the image.
        every_s: seconds between two looks at the build.
        told: takes each state of the build.
        clock: seconds.

    Raises:
        JobError: AWS refuses, or the build fails, in one line.
    """
    doing = "lambda:ListMicrovmImages"
    try:
        known = find_image(client, settings.image)
        if known is None:
            doing = "lambda:CreateMicrovmImage"
            made = client.create_microvm_image(name=settings.image, **_request(settings, wanted))
        else:
            doing = "lambda:UpdateMicrovmImage"
            made = client.update_microvm_image(imageIdentifier=known["imageArn"], **_request(settings, wanted))
        doing = "lambda:GetMicrovmImage"
        _wait(client, made["imageArn"], str(made["imageVersion"]), every_s=every_s, told=told, clock=clock)
    except Exception as e:
        raise refused(e, settings, doing=doing) from e
    return "created" if known is None else "updated"


def _wait(
    client: Any, arn: str, version: str, *, every_s: float, told: Callable[[str], None], clock: Callable[[], float]
) -> None:
    end, last = clock() + _BUILD_S, ""
    while clock() < end:
        state = str(client.get_microvm_image(imageIdentifier=arn)["state"])
        if state != last:
            told(f"image version {version}: {state.lower()}")
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
    raise JobError(
        f"the build of version {version} takes longer than {_BUILD_S / 60:.0f} minutes",
        remedy="look at it in the console",
    )


def _request(settings: AwsMicrovmSettings, wanted: ImageSpec) -> dict[str, object]:
    on = dict.fromkeys(("run", "suspend", "resume", "terminate"), "ENABLED")
    limits = {f"{name}TimeoutInSeconds": HOOK_S for name in on}
    return {
        "baseImageArn": BASE_IMAGE.format(region=settings.region), "buildRoleArn": wanted.build_role,
        "codeArtifact": {"uri": wanted.artifact}, "resources": [{"minimumMemoryInMiB": wanted.memory_mb}],
        "cpuConfigurations": [{"architecture": "ARM_64"}],
        "egressNetworkConnectors": [EGRESS.format(region=settings.region)],
        "description": "Trains models for ephemeron; run by `ephemeron train --platform aws-microvm`.",
        "logging": {"cloudWatch": {"logGroup": settings.log_group}},
        "environmentVariables": {
            **wanted.variables, DIGEST: wanted.digest, MEMORY: str(wanted.memory_mb), ROLE: wanted.role, NAME: settings.image,
        },
        "hooks": {
            "port": PORT, "microvmHooks": {**on, **limits},
            "microvmImageHooks": {
                "ready": "ENABLED", "readyTimeoutInSeconds": READY_S, "validate": "ENABLED", "validateTimeoutInSeconds": HOOK_S,
            },
        },
    }  # fmt: skip
