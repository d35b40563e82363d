"""Regions that exchange over TCP through an emulated wide-area network: blackouts, resets, slow links, regions that join and die."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence

import pytest
from tcp_regions import TOKEN, TcpWorld

from ephemeron.errors import LinkFailed
from ephemeron.regions.communicator import peer
from ephemeron.regions.communicator.network import RegionNetwork, host_and_port
from ephemeron.regions.communicator.tcp import TcpCommunicator
from ephemeron.testing.communicator_contract import NAMES, Opened, received, together, update
from ephemeron.testing.wan import EmulatedWan, WanLink
from ephemeron.training.worker.spec import GroupNetwork


class WanNetwork(RegionNetwork):
    """A region whose connections outwards pass the emulated network."""

    def __init__(self, region: str, wan: EmulatedWan, ports: dict[tuple[str, str], int]) -> None:
        super().__init__(GroupNetwork(listen="127.0.0.1:0"), token=TOKEN)
        self._region, self._wan, self._ports = region, wan, ports

    async def dial(self, endpoint: str, *, region: str) -> socket.socket:
        if not endpoint:
            raise LinkFailed("no endpoint")
        key = region, endpoint
        if key not in self._ports:
            self._ports[key] = await asyncio.to_thread(self._wan.route, self._region, region, host_and_port(endpoint))
        return await super().dial(f"127.0.0.1:{self._ports[key]}", region=region)


class WanWorld(TcpWorld):
    """All pairs of regions through one emulated network."""

    def __init__(self, wan: EmulatedWan) -> None:
        super().__init__(leave_s=3.0)
        self.wan, self.ports = wan, dict[str, dict[tuple[str, str], int]]()

    def communicator(
        self, region: str, *, identity: str = "", fence: int = 1, names: Sequence[str] = (), token: str = TOKEN
    ) -> TcpCommunicator:
        return TcpCommunicator(
            self.store,
            WanNetwork(region, self.wan, self.ports.setdefault(region, {})),
            run="run",
            token=token,
            region=region,
            identity=identity or f"launch of {region}",
            fence=fence,
            names=names,
            leave_s=3.0,
        )


@pytest.fixture
def wan() -> Iterator[EmulatedWan]:
    with EmulatedWan(WanLink(latency_s=0.005, jitter_s=0.005)) as made:
        yield made


@pytest.mark.parametrize("resets", [False, True])
def test_a_blackout_of_one_region_delays_no_other_and_loses_nothing(wan: EmulatedWan, resets: bool) -> None:
    async def work(opened: Opened) -> None:
        regions = [await opened(name) for name in NAMES]
        east, north, west = regions
        for each in regions:
            await each.publish(update(each.region, 1))
            for other in regions:
                if other is not each:
                    await received(other, each.region, 1)
        with wan.blackout("west"):
            if resets:
                await asyncio.to_thread(wan.reset, "west")
            await west.publish(update("west", 2))
            for number in (2, 3, 4):
                await east.publish(update("east", number))
                await north.publish(update("north", number))
                assert await received(north, "east", number)
                assert await received(east, "north", number)
            assert not [u for u in east.arrived({"west": {0: 1}}) if u.region == "west"]
        for number in (2, 3, 4):
            assert await received(west, "east", number)
        assert await received(north, "west", 2)

    together(WanWorld(wan), work, NAMES)


@pytest.mark.slow
def test_a_connection_on_which_nothing_is_heard_is_given_up_and_made_again(wan: EmulatedWan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "PING_S", 0.1)
    monkeypatch.setattr(peer, "SILENCE_S", 0.5)

    async def work(opened: Opened) -> None:
        east, north = await opened("east"), await opened("north")
        await east.publish(update("east", 1))
        await received(north, "east", 1)
        known = east._peers["north"]  # type: ignore[attr-defined]
        with wan.blackout("north"):
            await asyncio.wait_for(known.unrouted.wait(), timeout=120)
            await east.publish(update("east", 2))
        assert await received(north, "east", 2)

    together(WanWorld(wan), work)


def test_what_has_arrived_before_a_reset_is_not_sent_again(wan: EmulatedWan) -> None:
    large = bytes(range(256)) * 16_384  # 4 MiB

    async def work(opened: Opened) -> None:
        east, north = await opened("east"), await opened("north")
        await east.publish(update("east", 1))
        await received(north, "east", 1)
        for pair in (("east", "north"), ("north", "east")):
            await asyncio.to_thread(wan.link, *pair, WanLink(bandwidth_mbit_s=16))
        await east.publish(update("east", 2, large))
        inbox = north._inbox  # type: ignore[attr-defined]
        async with asyncio.timeout(120):
            while not (partial := [n for f, r, n in inbox.have("east") if r == 2]) or partial[0] < 2 << 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        wan.reset("east")
        assert await received(north, "east", 2) == large
        assert north.meter["east"].received < 1.25 * len(large)
        assert north.links["east"].bandwidth is not None

    together(WanWorld(wan), work)


def test_a_region_that_is_started_again_elsewhere_is_found(wan: EmulatedWan) -> None:
    async def work(opened: Opened) -> None:
        east, north = await opened("east"), await opened("north")
        await east.publish(update("east", 1))
        await received(north, "east", 1)
        await north.__aexit__(None, None, None)
        await east.publish(update("east", 2))
        again = await opened("north", fence=2)
        assert await received(again, "east", 2)
        await again.publish(update("north", 1, fence=2))
        assert await received(east, "north", 1)

    together(WanWorld(wan), work)


def test_a_region_joins_over_a_slow_link_while_the_others_go_on(wan: EmulatedWan) -> None:
    state = bytes(range(256)) * 2048

    async def work(opened: Opened) -> None:
        east, north = await opened("east"), await opened("north")
        for other in ("east", "north"):
            await asyncio.to_thread(wan.link, other, "west", WanLink(bandwidth_mbit_s=8, latency_s=0.05))
        await east.put_snapshot(3, state)
        west = await opened("west", since=3)
        joining = asyncio.create_task(west.latest_snapshot())
        number = 0
        while not joining.done():
            number += 1
            await east.publish(update("east", number))
            await received(north, "east", number)
        assert await joining == (3, state)
        assert number > 3, "rounds of the others while the state was read"
        assert await received(west, "east", number)

    together(WanWorld(wan), work)
