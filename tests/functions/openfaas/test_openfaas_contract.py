"""The platform contract, on OpenFaaS as the local gateway has it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from faas_entry import ENTRIES
from openfaas_world import PASSWORD, deployed, opened

from ephemeron.functions.base import Limits, Platform
from ephemeron.functions.entries import VARIABLE
from ephemeron.functions.openfaas.deploy.function import DeploymentSpec, spec_of
from ephemeron.functions.openfaas.preflight import gateway_of, inspect, make_ready
from ephemeron.functions.openfaas.settings import OpenFaasSettings
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from ephemeron.testing.platform_contract import PlatformContract
from ephemeron.testing.platform_entries import declaration


@pytest.fixture(scope="module")
def gateway() -> Iterator[OpenFaasGateway]:
    with pytest.MonkeyPatch.context() as patch, OpenFaasGateway(password=PASSWORD) as gateway:
        patch.setenv(VARIABLE, ENTRIES)
        yield gateway


@pytest.fixture(scope="module")
def settings(gateway: OpenFaasGateway, tmp_path_factory: pytest.TempPathFactory) -> OpenFaasSettings:
    recipe = tmp_path_factory.mktemp("image")
    return deployed(gateway, recipe, entries=ENTRIES, python_path=Path(__file__).parent)


@pytest.mark.slow
class TestOpenFaasContract(PlatformContract):
    @pytest.fixture(autouse=True)
    def _world(self, gateway: OpenFaasGateway, settings: OpenFaasSettings, tmp_path: Path) -> None:
        self.gateway, self.settings, self.folder = gateway, settings, tmp_path / "run"
        self.channel = (self.folder / "objects").as_uri()

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        async with opened(self.settings, self.folder, limits=limits) as platform:
            yield platform

    def throttle(self, requests: int) -> None:
        self.gateway.throttle(requests)

    def deliver_twice(self) -> None:
        self.gateway.deliver_twice(1)

    def needs(self, case: str) -> None:
        super().needs(case)
        if case == "memory" and self.gateway.enforcement.kind == "none":
            pytest.skip("no control groups to be had: nothing kills above a memory limit here")


@pytest.mark.slow
class TestOpenFaasContractOnARealGateway(PlatformContract):
    """The same against a cluster: EPHEMERON_OPENFAAS_URL, _IMAGE (its recipe written with `--contract-kit`), _CHANNEL."""

    test_timeout_s = 600.0

    @pytest.fixture(autouse=True)
    def _world(self, tmp_path: Path) -> Iterator[None]:
        names = [f"EPHEMERON_OPENFAAS_{what}" for what in ("URL", "IMAGE", "CHANNEL")]
        if missing := [name for name in names if not os.environ.get(name)]:
            pytest.skip(f"no real gateway: {', '.join(missing)} not set")
        url, image, self.channel = (os.environ[name] for name in names)
        self.folder = tmp_path / "run"
        self.settings = OpenFaasSettings(
            gateway=url, function="ephemeron-contract", every_s=1.0, callback=os.environ.get("EPHEMERON_OPENFAAS_CALLBACK", "")
        ).located()
        wanted = DeploymentSpec(
            image=image,
            memory_mb=self.memory_mb,
            lifetime_s=60.0,
            replicas=5,
            cpus=1.0,
            variables={"EPHEMERON_ENTRIES": declaration(), "EPHEMERON_PRELOAD": ""},
        )
        api = gateway_of(self.settings)
        api.deploy(spec_of(wanted, self.settings))
        make_ready(self.settings, inspect(self.settings), replicas=5)
        yield
        api.delete()

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        async with opened(self.settings, self.folder, limits=limits, channel=self.channel) as platform:
            yield platform
