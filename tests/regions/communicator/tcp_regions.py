"""Regions in one event loop that exchange over TCP on loopback."""

from __future__ import annotations

from collections.abc import Sequence

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.regions.communicator.network import RegionNetwork
from ephemeron.regions.communicator.tcp import TcpCommunicator
from ephemeron.testing.communicator_contract import CommunicatorWorld
from ephemeron.training.worker.spec import GroupNetwork

TOKEN = "token of the tests"
LOOPBACK = GroupNetwork(listen="127.0.0.1:0")


class TcpWorld(CommunicatorWorld):
    """Args:
    networks: by region, where it does not listen on loopback.
    options: of communicators.
    """

    def __init__(self, networks: dict[str, GroupNetwork] | None = None, **options: float) -> None:
        self.store, self.networks, self.options = MemoryChannel(), networks or {}, options

    def communicator(
        self, region: str, *, identity: str = "", fence: int = 1, names: Sequence[str] = (), token: str = TOKEN
    ) -> TcpCommunicator:
        network = RegionNetwork(self.networks.get(region, LOOPBACK), token=token)
        return TcpCommunicator(
            self.store,
            network,
            run="run",
            token=token,
            region=region,
            identity=identity or f"launch of {region}",
            fence=fence,
            names=names,
            **self.options,  # type: ignore[arg-type]
        )
