"""The platform contract, on Lithops' localhost backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("lithops", reason="no Lithops; pip install 'ephemeron[lithops]'")

from ephemeron.functions.base import Limits, Platform
from ephemeron.functions.lithops.platform import LithopsPlatform
from ephemeron.functions.lithops.settings import LithopsSettings
from ephemeron.testing.platform_contract import PlatformContract
from ephemeron.testing.platform_entries import declaration

pytestmark = pytest.mark.slow

ENTRY = {"EPHEMERON_ENTRIES": declaration(), "EPHEMERON_PRELOAD": ""}


class TestLithopsContract(PlatformContract):
    @pytest.fixture(autouse=True)
    def _world(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
        monkeypatch.setenv("LITHOPS_CONFIG", "{}")  # none of the machine's own
        self.folder = tmp_path / "run"
        self.channel = (self.folder / "objects").as_uri()

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        settings = LithopsSettings(every_s=0.1, places=8, variables=ENTRY)
        platform = await LithopsPlatform.open(self.folder, settings, channel=self.channel, run="run", limits=limits)
        try:
            yield platform
        finally:
            await platform.shutdown()
