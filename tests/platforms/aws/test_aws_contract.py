"""The platform contract, on AWS Lambda as the local service has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="no AWS client; pip install 'ephemeron[aws]'")
pytest.importorskip("awslambdaric", reason="no runtime client; pip install awslambdaric")

from aws_world import deployed, keys, opened  # noqa: E402

from ephemeron.platforms.aws.settings import AwsSettings  # noqa: E402
from ephemeron.platforms.base import Call, Limits, Platform  # noqa: E402
from ephemeron.testing.lambda_service import LambdaService  # noqa: E402
from ephemeron.testing.platform_contract import PlatformContract  # noqa: E402

KIT = Path(__file__).parents[3] / "src"


@pytest.fixture(scope="module")
def settings() -> Iterator[AwsSettings]:
    with keys(), LambdaService(concurrency=20) as service:
        # The deployed code leaves the kit out: functions find it where this interpreter does.
        yield deployed(service, entry="kit_entry:dispatch", folder=Path(__file__).parent)


class TestAwsContract(PlatformContract):
    @pytest.fixture(autouse=True)
    def _world(self, settings: AwsSettings, tmp_path: Path) -> None:
        self.settings, self.folder = settings, tmp_path / "run"
        self.channel = (self.folder / "objects").as_uri()

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        async with opened(self.settings, self.folder, limits=limits) as platform:
            yield platform

    def call(self, run: str, entry: str, **changes: Any) -> Call:
        return super().call(run, entry, **changes)
