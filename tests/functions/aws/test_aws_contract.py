"""The platform contract, on AWS Lambda as the local service has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import deployed, keys, opened
from kit_entry import ENTRIES

from ephemeron.functions.aws.settings import AwsSettings
from ephemeron.functions.base import Limits, Platform
from ephemeron.testing.lambda_service import LambdaService
from ephemeron.testing.platform_contract import PlatformContract


@pytest.fixture(scope="module")
def service() -> Iterator[LambdaService]:
    with keys(), LambdaService(concurrency=20) as service:
        yield service


@pytest.fixture(scope="module")
def settings(service: LambdaService) -> AwsSettings:
    # The deployed code leaves the kit out: functions find it where this interpreter does.
    return deployed(service, entries=ENTRIES, folder=Path(__file__).parent)


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
