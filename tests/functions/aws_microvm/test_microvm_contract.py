"""The platform contract, on AWS Lambda MicroVMs as the local service has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("boto3", "1.44", reason="no AWS client that knows MicroVMs; pip install 'ephemeron[aws]'")

from microvm_world import opened

from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings
from ephemeron.functions.base import Limits, Platform
from ephemeron.testing.microvm_service import MicrovmService
from ephemeron.testing.platform_contract import PlatformContract


@pytest.mark.slow
class TestAwsMicrovmContract(PlatformContract):
    memory_mb = 512

    @pytest.fixture(autouse=True)
    def _world(self, service: MicrovmService, settings: AwsMicrovmSettings, tmp_path: Path) -> None:
        self.service, self.settings, self.folder = service, settings, tmp_path / "run"
        self.channel = (self.folder / "objects").as_uri()

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        async with opened(self.settings, self.folder, limits=limits) as platform:
            yield platform

    def throttle(self, requests: int) -> None:
        self.service.throttle(requests)
