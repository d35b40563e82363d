from __future__ import annotations
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
import pytest
from ephemeron.platforms.base import Limits, Platform
from ephemeron.platforms.local import LocalPlatform
from ephemeron.testing.platform_contract import PlatformContract
DISPATCH = {"EPHEMERON_PRELOAD": "", "EPHEMERON_ENTRY": "ephemeron.testing.platform_entries:dispatch"}


class TestContract(PlatformContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "run"

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        platform = await LocalPlatform.start(self.folder, limits=limits, env=DISPATCH)
        try:
            yield platform
        finally:
            await platform.shutdown()
