"""A function on the local gateway, and a platform that runs on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ephemeron.functions.base import Limits
from ephemeron.functions.openfaas.deploy.function import DeploymentSpec, specs_of, write_recipe
from ephemeron.functions.openfaas.gateway import Gateway
from ephemeron.functions.openfaas.platform import LIMITS, OpenFaasPlatform
from ephemeron.functions.openfaas.settings import Credentials, OpenFaasSettings
from ephemeron.functions.source_bundle import digest
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from running import until

PASSWORD = "the tests' own"
IMAGE = "registry.example/ephemeron:1"
EVERY_S = 0.1
CALLBACK = "http://127.0.0.1:0"
"""A free port."""


def settings_of(gateway: OpenFaasGateway, **more: Any) -> OpenFaasSettings:
    return OpenFaasSettings(**{"gateway": gateway.url, "every_s": EVERY_S, "callback": CALLBACK, **more})


def client(settings: OpenFaasSettings) -> Gateway:
    return Gateway(settings, Credentials("admin", PASSWORD))


def deployed(
    gateway: OpenFaasGateway,
    folder: Path,
    *,
    entries: str = "",
    memory_mb: int = 256,
    lifetime_s: float = 60.0,
    replicas: int = 5,
    sizes: tuple[int, ...] = (),
    preload: str = "",
    python_path: Path | None = None,
    variables: dict[str, str] | None = None,
    **more: Any,
) -> OpenFaasSettings:
    """Deploys this working tree's recipe as function `ephemeron`, and waits until all replicas are ready."""
    settings = settings_of(gateway, **more)
    write_recipe(folder)
    gateway.add_image(IMAGE, folder)
    told = {"EPHEMERON_ENTRIES": entries, "EPHEMERON_PRELOAD": preload, **(variables or {})}
    if python_path is not None:
        told["PYTHONPATH"] = f"{folder}:{python_path}"
    wanted = DeploymentSpec(
        image=IMAGE,
        memory_mb=memory_mb,
        lifetime_s=lifetime_s,
        replicas=replicas,
        cpus=0.0 if sizes else 1.0,
        inside=gateway.url,
        digest=digest(),
        variables=told,
    )
    for spec in specs_of(wanted, settings, sizes or (memory_mb,)):
        api = client(replace(settings, function=spec.service))
        api.deploy(spec)
        api.scale(replicas)
        until(lambda api=api: api.function().available >= replicas)
    return settings


@asynccontextmanager
async def opened(
    settings: OpenFaasSettings, folder: Path, *, limits: Limits = LIMITS, run: str = "run", channel: str = ""
) -> AsyncIterator[OpenFaasPlatform]:
    platform = await OpenFaasPlatform.open(folder, settings, channel=channel or (folder / "objects").as_uri(), run=run, limits=limits)
    try:
        yield platform
    finally:
        await platform.shutdown()
