"""An image on the local MicroVM service, and a platform that runs on it."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from microvm_entries import ENTRIES

from ephemeron.functions.aws_microvm.api import LaunchSpec
from ephemeron.functions.aws_microvm.deploy.image import ImageSpec, build_artifact, deploy
from ephemeron.functions.aws_microvm.platform import LIMITS, AwsMicrovmPlatform
from ephemeron.functions.aws_microvm.preflight import inspect
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, client
from ephemeron.functions.base import Limits
from ephemeron.functions.entries import VARIABLE
from ephemeron.functions.source_bundle import digest
from ephemeron.testing.microvm_service import MicrovmService

ROLE = "arn:aws:iam::123456789012:role/ephemeron-microvm"
BUILD_ROLE = "arn:aws:iam::123456789012:role/ephemeron-microvm-build"
ARTIFACT = "s3://artifacts/ephemeron.zip"
EVERY_S = 0.1
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextmanager
def keys() -> Iterator[None]:
    """Credentials of no value, and none of the machine's own; and the entries that tests deploy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {**KEYS, VARIABLE: ENTRIES}.items():
            patch.setenv(name, value)
        yield


@functools.cache
def artifact(uri: str) -> bytes:
    """What lies in the bucket: this working tree's package."""
    assert uri.startswith("s3://"), uri
    return build_artifact()


def settings_of(service: MicrovmService, **more: Any) -> AwsMicrovmSettings:
    values = {"region": "us-east-1", "endpoint": service.url, "every_s": EVERY_S, **more}
    return AwsMicrovmSettings(**values)


def deployed(
    service: MicrovmService,
    *,
    entries: str = "",
    memory_mb: int = 512,
    folder: Path | None = None,
    preload: str = "",
    sizes_mb: tuple[int, ...] = (),
    more_variables: Mapping[str, str] | None = None,
    **more: Any,
) -> AwsMicrovmSettings:
    """Deploys this working tree's package as image `ephemeron`, with the kit's functions beside it."""
    settings = settings_of(service, **more)
    variables = {VARIABLE: entries, "EPHEMERON_PRELOAD": preload, **(more_variables or {})}
    if folder is not None:
        variables["PYTHONPATH"] = str(folder)
    wanted = ImageSpec(artifact=ARTIFACT, build_role=BUILD_ROLE, role=ROLE, memory_mb=memory_mb, variables=variables, digest=digest())
    deploy(client(settings), settings, wanted, sizes_mb or (memory_mb,), every_s=0.1)
    return settings


def launch_of(settings: AwsMicrovmSettings) -> LaunchSpec:
    return inspect(settings.located()).launch


@asynccontextmanager
async def opened(
    settings: AwsMicrovmSettings, folder: Path, *, limits: Limits = LIMITS, run: str = "run", channel: str = ""
) -> AsyncIterator[AwsMicrovmPlatform]:
    platform = await AwsMicrovmPlatform.open(
        folder, settings, launch_of(settings), channel=channel or (folder / "objects").as_uri(), run=run, limits=limits
    )
    try:
        yield platform
    finally:
        await platform.shutdown()
