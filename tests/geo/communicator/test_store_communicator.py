"""The communicator over a store passes the tests of all communicators."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.geo.communicator import Communicator
from ephemeron.geo.communicator.store import StoreCommunicator
from ephemeron.testing.communicator_contract import CommunicatorContract, CommunicatorWorld


class StoreWorld(CommunicatorWorld):
    def __init__(self) -> None:
        self.store = MemoryChannel()

    def communicator(self, region: str, *, identity: str, fence: int, names: Sequence[str]) -> Communicator:
        return StoreCommunicator(self.store, run="run", region=region, identity=identity, fence=fence, names=names)


class TestStoreCommunicator(CommunicatorContract):
    @pytest.fixture
    def world(self) -> StoreWorld:
        return StoreWorld()
