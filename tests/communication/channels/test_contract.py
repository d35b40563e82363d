"""One contract, every channel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ephemeron.communication.channels import Channel, MemoryChannel, open_channel
from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.testing import ChannelContract

if TYPE_CHECKING:
    from servers import ServerProcess


class TestMemory(ChannelContract):
    async def open(self) -> Channel:
        return MemoryChannel()


class TestMemoryParameterServer(ChannelContract):
    async def open(self) -> Channel:
        return MemoryParameterServer()


class TestFolder(ChannelContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.base = tmp_path / "made" / "when needed"

    async def open(self) -> Channel:
        return open_channel("folder", base=self.base)


class TestS3(ChannelContract):
    many_keys = 1_050
    readers = 12
    rewrites = 10

    @pytest.fixture(autouse=True)
    def _bucket(self, s3: str) -> None:
        self.address = s3

    async def open(self) -> Channel:
        return open_channel(self.address)

    @pytest.mark.slow
    def test_list_and_delete_do_many_keys(self) -> None:
        super().test_list_and_delete_do_many_keys()


class TestCache(ChannelContract):
    @pytest.fixture(autouse=True)
    def _server(self, valkey_server: ServerProcess) -> None:
        self.address = valkey_server.address

    async def open(self) -> Channel:
        return open_channel(self.address)


class TestParameterServer(ChannelContract):
    @pytest.fixture(autouse=True)
    def _server(self, parameter_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("EPHEMERON_CHANNEL_TOKEN", parameter_server.env["EPHEMERON_CHANNEL_TOKEN"])
        self.address = parameter_server.address

    async def open(self) -> Channel:
        return open_channel(self.address)
