"""Platforms ready for calls, as `benchmarks.platforms` measures them.

The Lambda service and the OpenFaaS gateway are our own (`ephemeron.testing`), Lithops has its localhost backend, and Ray is
one node that this process starts. All functions are processes of this machine: none of their figures is a cloud's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ephemeron.functions.base import Limits, Platform
from ephemeron.units import MIB

ROOT = Path(__file__).resolve().parents[1]
MEMORY_MB = 256
ENTRY = {"EPHEMERON_ENTRIES": "start=benchmarks.platform_functions:run_start", "EPHEMERON_PRELOAD": ""}
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
EVERY_S = 0.1
"""Seconds between reports here; in a cloud functions report every 5 s."""
LIMITS = Limits(memory_max_mb=4096, lifetime_s=120.0, concurrency=32)
Open: TypeAlias = Callable[[Path, str], AbstractAsyncContextManager[Platform]]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One platform."""

    name: str
    open: Open
    """Opens the platform for a folder and a run."""
    chill: Callable[[], Awaitable[None]]
    """Makes the next call a cold one, if the platform distinguishes cold and warm calls."""
    note: str


async def _nothing() -> None:
    """Every run, or every call, is cold without further action."""


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[World]:
    """Local platform: processes with quotas."""
    from ephemeron.functions.local import LocalPlatform

    @asynccontextmanager
    async def opened(run_dir: Path, run: str) -> AsyncIterator[Platform]:
        platform = await LocalPlatform.start(run_dir, limits=LIMITS, env={**ENTRY, "PYTHONPATH": PATHS})
        try:
            yield platform
        finally:
            await platform.shutdown()

    yield World(name="local", open=opened, chill=_nothing, note="processes of the daemon; each run has its own pool")


@asynccontextmanager
async def aws(folder: Path) -> AsyncIterator[World]:
    """AWS on our Lambda service, with Amazon's runtime client in each environment."""
    from ephemeron.functions.aws.deploy.function import LambdaSpec, deploy
    from ephemeron.functions.aws.deploy.package import build_zip
    from ephemeron.functions.aws.platform import AwsPlatform
    from ephemeron.functions.aws.settings import AwsSettings, client
    from ephemeron.functions.source_bundle import digest
    from ephemeron.testing.lambda_service import LambdaService

    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_REGION="us-east-1")
    with LambdaService(concurrency=32) as service:
        settings = AwsSettings(region="us-east-1", endpoint=service.url, every_s=EVERY_S)
        wanted = LambdaSpec(
            role="arn:aws:iam::123456789012:role/none",
            memory_mb=MEMORY_MB,
            timeout_s=120,
            zipped=build_zip(),
            variables={**ENTRY, "PYTHONPATH": str(ROOT)},
            digest=digest(),
        )
        await asyncio.to_thread(deploy, client(settings, "lambda"), settings, wanted)

        @asynccontextmanager
        async def opened(run_dir: Path, run: str) -> AsyncIterator[Platform]:
            channel = (run_dir / "objects").as_uri()
            platform = await AwsPlatform.open(run_dir, settings, channel=channel, run=run, limits=LIMITS)
            try:
                yield platform
            finally:
                await platform.shutdown()

        async def chill() -> None:
            for environment in service.environments():
                if not environment.request_id:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(environment.pid, signal.SIGKILL)
            await _until(lambda: not service.environments())

        yield World(name="aws", open=opened, chill=chill, note="our Lambda service, awslambdaric in each environment")


@asynccontextmanager
async def openfaas(folder: Path) -> AsyncIterator[World]:
    """OpenFaaS on our gateway, with the real handler in each replica."""
    from ephemeron.functions.openfaas.deploy.function import DeploymentSpec, spec_of, write_recipe
    from ephemeron.functions.openfaas.gateway import Gateway
    from ephemeron.functions.openfaas.platform import OpenFaasPlatform
    from ephemeron.functions.openfaas.settings import Credentials, OpenFaasSettings
    from ephemeron.functions.source_bundle import digest
    from ephemeron.testing.openfaas_gateway import OpenFaasGateway

    password, image = "of the benchmark", "benchmark/ephemeron:1"
    with OpenFaasGateway(password=password) as gateway:
        settings = OpenFaasSettings(gateway=gateway.url, every_s=EVERY_S)
        recipe = folder / "image"
        write_recipe(recipe)
        gateway.add_image(image, recipe)
        variables = {**ENTRY, "PYTHONPATH": f"{recipe}:{ROOT}"}
        wanted = DeploymentSpec(
            image=image,
            memory_mb=MEMORY_MB,
            lifetime_s=120.0,
            replicas=8,
            cpus=1.0,
            inside=gateway.url,
            digest=digest(),
            variables=variables,
        )
        api = Gateway(settings, Credentials("admin", password))
        await asyncio.to_thread(api.deploy, spec_of(wanted, settings))
        await asyncio.to_thread(api.scale, 8)
        await _until(lambda: api.function().available == 8)

        @asynccontextmanager
        async def opened(run_dir: Path, run: str) -> AsyncIterator[Platform]:
            channel = (run_dir / "objects").as_uri()
            platform = await OpenFaasPlatform.open(run_dir, settings, channel=channel, run=run, limits=LIMITS)
            try:
                yield platform
            finally:
                await platform.shutdown()

        async def chill() -> None:
            await asyncio.to_thread(api.scale, 0)
            await _until(lambda: not gateway.replicas())
            await asyncio.to_thread(api.scale, 8)

        yield World(name="openfaas", open=opened, chill=chill, note="our gateway; cold: 8 replicas start together from none")


@asynccontextmanager
async def lithops(folder: Path) -> AsyncIterator[World]:
    """Lithops on its localhost backend."""
    from ephemeron.functions.lithops.platform import LithopsPlatform
    from ephemeron.functions.lithops.settings import LithopsSettings

    os.environ["LITHOPS_CONFIG"] = "{}"
    os.environ["PYTHONPATH"] = PATHS
    settings = LithopsSettings(every_s=EVERY_S, places=16, variables=ENTRY)

    @asynccontextmanager
    async def opened(run_dir: Path, run: str) -> AsyncIterator[Platform]:
        channel = (run_dir / "objects").as_uri()
        platform = await LithopsPlatform.open(run_dir, settings, channel=channel, run=run, limits=LIMITS)
        try:
            yield platform
        finally:
            await platform.shutdown()

    yield World(name="lithops", open=opened, chill=_nothing, note="localhost backend; each call starts a process")


@asynccontextmanager
async def ray(folder: Path) -> AsyncIterator[World]:
    """Ray on a cluster of one node."""
    import ray as library
    from ray.cluster_utils import Cluster

    from ephemeron.functions.ray.platform import RayPlatform
    from ephemeron.functions.ray.settings import RaySettings

    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=PATHS)
    node = {"num_cpus": 8, "object_store_memory": 80 * MIB, "memory": 8192 * MIB, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)  # in this thread, because it sets signal handlers
    library.init(address=cluster.address, log_to_driver=False)
    settings = RaySettings(address=cluster.address, every_s=EVERY_S, variables=ENTRY).located()

    @asynccontextmanager
    async def opened(run_dir: Path, run: str) -> AsyncIterator[Platform]:
        channel = (run_dir / "objects").as_uri()
        platform = await RayPlatform.open(run_dir, settings, channel=channel, run=run, limits=LIMITS)
        try:
            yield platform
        finally:
            await platform.shutdown()

    try:
        yield World(name="ray", open=opened, chill=_nothing, note="one node; each call is an actor with a process of its own")
    finally:
        library.shutdown()
        cluster.shutdown()


WORLDS: dict[str, Callable[[Path], AbstractAsyncContextManager[World]]] = {
    "local": local,
    "aws": aws,
    "openfaas": openfaas,
    "lithops": lithops,
    "ray": ray,
}


async def _until(true: Callable[[], Any], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not await asyncio.to_thread(true):
        if time.monotonic() > end:
            raise TimeoutError("a service did not become ready")
        await asyncio.sleep(0.02)
