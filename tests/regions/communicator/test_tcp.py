"""The communicator over TCP."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path

import pytest
from region_certificates import Authority
from tcp_regions import TcpWorld

from ephemeron.communication.direct.rendezvous_service import RendezvousService
from ephemeron.errors import ChannelTimeout, RegionSuperseded, UpdateForgotten
from ephemeron.testing.communicator_contract import (
    NAMES,
    CommunicatorConnectionContract,
    CommunicatorContract,
    Opened,
    received,
    together,
    update,
)
from ephemeron.testing.direct_world import until
from ephemeron.training.worker.spec import GroupNetwork


class TestTcpCommunicator(CommunicatorContract):
    @pytest.fixture
    def world(self) -> TcpWorld:
        return TcpWorld(leave_s=3.0)


class TestTcpCommunicatorWithCertificates(CommunicatorConnectionContract):
    @pytest.fixture
    def world(self, tmp_path: Path) -> TcpWorld:
        authority = Authority(tmp_path)
        return TcpWorld({name: authority.network(name) for name in NAMES}, leave_s=3.0)


class RelayedWorld(TcpWorld):
    """Regions that do not listen, and a relay."""

    async def __aenter__(self) -> RelayedWorld:
        self.service = RendezvousService("token of the relay")
        host, port = await self.service.listen()
        self.networks = {name: GroupNetwork(relay=f"{host}:{port}") for name in NAMES}
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.service.close()


class TestTcpCommunicatorThroughARelay(CommunicatorConnectionContract):
    @pytest.fixture
    def world(self, monkeypatch: pytest.MonkeyPatch) -> TcpWorld:
        monkeypatch.setenv("EPHEMERON_RENDEZVOUS_TOKEN", "token of the relay")
        return RelayedWorld(leave_s=3.0)


def test_a_region_that_only_connects_outwards_exchanges_with_those_that_listen() -> None:
    async def work(opened: Opened) -> None:
        east, north = await opened("east"), await opened("north")
        for each, other in ((east, north), (north, east)):
            await each.publish(update(each.region, 1))
            assert await received(other, each.region, 1)

    together(TcpWorld({"east": GroupNetwork()}, leave_s=0.1), work)


@pytest.mark.parametrize("wrong", ["authority", "name", "none"])
def test_a_region_without_its_certificate_is_not_connected(tmp_path: Path, wrong: str) -> None:
    authority, other = Authority(tmp_path / "one"), Authority(tmp_path / "other")
    networks = {"east": authority.network("east")}
    networks["north"] = {
        "authority": other.network("north", listen=""),
        "name": authority.network("west", listen=""),
        "none": GroupNetwork(),
    }[wrong]

    async def work(opened: Opened) -> None:
        east, north = await opened("east"), await opened("north")
        await east.publish(update("east", 1))
        with pytest.raises(ChannelTimeout):
            await north.get("east", 0, 1, deadline=asyncio.get_running_loop().time() + 1.0)
        assert sum(each.received for each in east.meter.values()) < 1000

    together(TcpWorld(networks, leave_s=0.1), work)


def test_a_region_with_another_token_is_not_connected() -> None:
    world = TcpWorld(leave_s=0.1)

    async def work(opened: Opened) -> None:
        east = await opened("east")
        await east.publish(update("east", 1))
        async with world.communicator("north", names=NAMES[:2], token="another") as north:
            await north.join()
            with pytest.raises(ChannelTimeout):
                await north.get("east", 0, 1, deadline=asyncio.get_running_loop().time() + 1.0)

    together(world, work)


def test_a_superseded_attempt_publishes_nothing_more() -> None:
    async def work(opened: Opened) -> None:
        old, north = await opened("east"), await opened("north")
        await old.publish(update("east", 1, b"of both"))
        await received(north, "east", 1)
        new = await opened("east", fence=2)
        await new.publish(update("east", 1, b"of both", fence=2))
        await new.publish(update("east", 2, b"of the newer", fence=2))
        assert await received(north, "east", 2) == b"of the newer"

        async def goes_on() -> None:
            number = 2
            while True:
                await old.publish(update("east", number, b"of the zombie"))
                await asyncio.sleep(0.02)
                number += 1

        with pytest.raises(RegionSuperseded):
            await asyncio.wait_for(goes_on(), timeout=120)
        assert not [u for u in north.arrived({}) if u.payload == b"of the zombie"]

    together(TcpWorld(leave_s=0.1), work)


def test_a_region_that_lags_too_far_behind_is_told() -> None:
    async def work(opened: Opened) -> None:
        east = await opened("east")
        for number in range(1, 11):
            await east.publish(update("east", number, bytes(1000)))
        north = await opened("north")
        assert len(await received(north, "east", 10)) == 1000
        with pytest.raises(UpdateForgotten):
            await received(north, "east", 1)

    together(TcpWorld(limit_bytes=3000, leave_s=0.1), work)


def test_acknowledged_updates_are_forgotten() -> None:
    async def work(opened: Opened) -> None:
        east, north = await opened("east"), await opened("north")
        for number in range(1, 6):
            await east.publish(update("east", number))
            await received(north, "east", number)
            await north.acknowledge("east", 0, number)
        await until(lambda: not east._outbox.updates)  # type: ignore[attr-defined]

    together(TcpWorld(), work)


def test_a_region_that_has_left_gives_late_regions_its_updates_through_the_store() -> None:
    async def work(opened: Opened) -> None:
        east = await opened("east")
        await east.publish(update("east", 1))
        await east.leave(after=1)
        await east.__aexit__(None, None, None)
        north = await opened("north")
        assert await received(north, "east", 1) == b"east 0 1"

    together(TcpWorld(leave_s=0.1), work)


@pytest.mark.parametrize("how", ["plain", "certificates", "relay"])
def test_the_kernel_counts_what_is_sent_and_what_encryption_adds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("EPHEMERON_RENDEZVOUS_TOKEN", "token of the relay")
    if how == "relay":
        world: TcpWorld = RelayedWorld(leave_s=0.1)
    else:
        authority = Authority(tmp_path)
        networks = {name: authority.network(name) for name in NAMES} if how == "certificates" else None
        world = TcpWorld(networks, leave_s=0.1)

    async def work(opened: Opened) -> None:
        east, north = await opened("east"), await opened("north")
        payload = random.Random(0).randbytes(1_000_000)
        await east.publish(update("east", 1, payload))
        assert await received(north, "east", 1) == payload
        there = north.meter["east"]
        if not there.kernel_received and not hasattr(socket, "TCP_INFO"):
            pytest.skip("no counters of TCP connections here")
        assert len(payload) < there.received <= there.kernel_received < 1.1 * there.received
        await until(lambda: east.meter["north"].kernel_sent >= there.kernel_received)

    together(world, work)
