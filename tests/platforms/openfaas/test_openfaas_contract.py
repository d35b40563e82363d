"""The platform contract, on OpenFaaS as the local gateway has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openfaas_world import PASSWORD, deployed, opened

from ephemeron.platforms.base import Limits, Platform
from ephemeron.platforms.openfaas.settings import OpenFaasSettings
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from ephemeron.testing.platform_contract import PlatformContract


@pytest.fixture(scope="module")
def gateway() -> Iterator[OpenFaasGateway]:
    with OpenFaasGateway(password=PASSWORD) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def settings(gateway: OpenFaasGateway, tmp_path_factory: pytest.TempPathFactory) -> OpenFaasSettings:
    recipe = tmp_path_factory.mktemp("image")
    return deployed(gateway, recipe, entry="faas_entry:dispatch", python_path=Path(__file__).parent)


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
