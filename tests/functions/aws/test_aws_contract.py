"""The platform contract, on AWS Lambda as the local service has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import opened

from ephemeron.functions.aws.settings import AwsSettings
from ephemeron.functions.base import Limits, Platform
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.testing.platform_contract import PlatformContract


@pytest.mark.slow
class TestAwsContract(PlatformContract):
    @pytest.fixture(autouse=True)
    def _world(self, service: LambdaService, settings: AwsSettings, tmp_path: Path) -> None:
        self.service, self.settings, self.folder = service, settings, tmp_path / "run"
        self.channel = (self.folder / "objects").as_uri()

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        async with opened(self.settings, self.folder, limits=limits) as platform:
            yield platform

    def throttle(self, requests: int) -> None:
        self.service.throttle(requests)

    def deliver_twice(self) -> None:
        self.service.deliver_twice(1)
