"""A function on the local Lambda service, and a platform that runs on it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit_entry import ENTRIES

from ephemeron.functions.aws.deploy.function import LambdaSpec, deploy_sizes
from ephemeron.functions.aws.deploy.package import build_zip
from ephemeron.functions.aws.platform import LIMITS, AwsPlatform
from ephemeron.functions.aws.settings import AwsSettings, client
from ephemeron.functions.base import Limits
from ephemeron.functions.entries import VARIABLE
from ephemeron.functions.source_bundle import digest
from ephemeron.testing.lambda_service import LambdaService

ROLE = "arn:aws:iam::123456789012:role/ephemeron"
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


def settings_of(service: LambdaService, **more: Any) -> AwsSettings:
    values = {"region": "us-east-1", "endpoint": service.url, "every_s": EVERY_S, **more}
    return AwsSettings(**values)


def deployed(
    service: LambdaService,
    *,
    entries: str = "",
    memory_mb: int = 256,
    timeout_s: int = 60,
    sizes: tuple[int, ...] = (),
    folder: Path | None = None,
    preload: str = "",
    **more: Any,
) -> AwsSettings:
    """Deploys this working tree's package as function `ephemeron`, with the kit's functions beside it."""
    settings = settings_of(service, **more)
    variables = {"EPHEMERON_ENTRIES": entries, "EPHEMERON_PRELOAD": preload}
    if folder is not None:
        variables["PYTHONPATH"] = str(folder)
    wanted = LambdaSpec(role=ROLE, memory_mb=memory_mb, timeout_s=timeout_s, zipped=build_zip(), variables=variables, digest=digest())
    deploy_sizes(client(settings, "lambda"), settings, wanted, sizes or (memory_mb,))
    return settings


@asynccontextmanager
async def opened(
    settings: AwsSettings, folder: Path, *, limits: Limits = LIMITS, run: str = "run", channel: str = "", **more: Any
) -> AsyncIterator[AwsPlatform]:
    platform = await AwsPlatform.open(folder, settings, channel=channel or (folder / "objects").as_uri(), run=run, limits=limits, **more)
    try:
        yield platform
    finally:
        await platform.shutdown()
