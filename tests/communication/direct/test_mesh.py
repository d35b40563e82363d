"""The mesh: who is connected to whom, by which route, and whose messages are accepted."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from ephemeron.communication.direct import Head, LinkFailed, Mesh, store_route
from ephemeron.communication.direct.connection import Connection
from ephemeron.communication.direct.endpoint import Endpoint
from ephemeron.communication.direct.memory_transport import MemoryNetwork, MemoryTransport
from ephemeron.communication.direct.message import Kind
from ephemeron.communication.direct.tls_socket import PinnedTls
from ephemeron.communication.direct.transport import SharedTransport, TcpTransport, Transport, UnixTransport
from ephemeron.functions import simulation
from ephemeron.testing.direct_world import DirectWorld, all_connected, memory_mesh, until

MADE: dict[str, Callable[[], list[Transport]]] = {
    "shared": lambda: [SharedTransport()],
    "unix": lambda: [UnixTransport()],
    "tcp": lambda: [TcpTransport()],
    "tls": lambda: [TcpTransport(tls=PinnedTls())],
    "both": lambda: [UnixTransport(), TcpTransport()],
}


@asynccontextmanager
async def joined(world: DirectWorld, made: Callable[[], list[Transport]] | None = None) -> AsyncIterator[list[Mesh]]:
    try:
        meshes = list(await asyncio.gather(*(world.join(r, transports=made() if made else None) for r in range(world.ranks))))
        await all_connected(*meshes)
        yield meshes
    finally:
        for mesh in world.meshes:
            await mesh.close()


class Inbox:
    def __init__(self, mesh: Mesh, kind: int = Kind.CONTRIBUTION) -> None:
        self.got: list[tuple[int, Head, bytes]] = []
        mesh.handle(kind, lambda rank, head, body: self.got.append((rank, head, bytes(body))))

    @property
    def numbers(self) -> list[int]:
        return [head.number for _, head, _ in self.got]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(main())


@pytest.mark.parametrize("kind", MADE)
def test_messages_arrive_whole_and_in_order(kind: str) -> None:
    async def scenario() -> None:
        async with joined(DirectWorld(4), MADE[kind]) as meshes:
            assert meshes[0].transport_of(1) == {"both": "unix", "tls": "tcp"}.get(kind, kind)
            inboxes = [Inbox(mesh) for mesh in meshes]
            rng = np.random.default_rng(1)
            sizes = [0, 1, 47, 32_767, 300_000, 5_000_000, 3, 0, 1_000_000, 64_000]
            bodies = [rng.bytes(n) for n in sizes]
            for number, body in enumerate(bodies):
                for sender in meshes:
                    for target in range(4):
                        if target != sender.rank:
                            half = len(body) // 2
                            parts = [body[:half], memoryview(body)[half:]]
                            assert sender.send(target, Kind.CONTRIBUTION, number, 7, b"x" * number, parts)
            await until(lambda: all(len(i.got) == 3 * len(sizes) for i in inboxes))
            for inbox in inboxes:
                for sender in range(4):
                    mine = [(h.number, h.part, h.extra, body) for rank, h, body in inbox.got if rank == sender]
                    assert not mine or mine == [(n, 7, b"x" * n, b) for n, b in enumerate(bodies)]
            assert meshes[0].sent_bytes >= 3 * sum(sizes)
            assert meshes[0].received_bytes >= 3 * sum(sizes)

    run(scenario)


def test_bodies_are_received_where_the_receiver_wants_them() -> None:
    async def scenario() -> None:
        async with joined(DirectWorld(2), MADE["unix"]) as (a, b):
            whole = np.zeros(300_000)
            places: list[object] = []

            def allocate(rank: int, head: Head, nbytes: int) -> memoryview:
                return memoryview(whole[head.part :][: nbytes // 8]).cast("B")

            b.handle(Kind.MERGED, lambda rank, head, body: places.append(body.obj), allocate)
            part = np.arange(100_000, dtype=np.float64)
            a.send(1, Kind.MERGED, 0, 150_000, b"", [part.data])
            await until(lambda: bool(places))
            assert np.array_equal(whole[150_000:250_000], part)
            assert not whole[:150_000].any()
            assert not whole[250_000:].any()

    run(scenario)


def test_messages_that_come_before_their_handler_are_kept() -> None:
    async def scenario() -> None:
        async with memory_mesh(2) as (a, b):
            a.send(1, Kind.STATUS, 5)
            await asyncio.sleep(0.01)
            inbox = Inbox(b, Kind.STATUS)
            assert inbox.numbers == [5]

    run(scenario)


def test_a_newer_attempt_takes_the_place_of_an_older_one() -> None:
    async def scenario() -> None:
        world = DirectWorld(3)
        async with joined(world) as (a, b, zombie):
            inbox = Inbox(a)
            connected: list[tuple[int, int]] = []
            a.on_connect.append(lambda rank, attempt: connected.append((rank, attempt)))
            zombie.send(0, Kind.CONTRIBUTION, 1)
            await until(lambda: inbox.numbers == [1])
            new = await world.join(2, attempt=1)
            await all_connected(a, b, new)
            await until(lambda: a.attempt_of(2) == 1 and b.attempt_of(2) == 1)
            zombie.send(0, Kind.CONTRIBUTION, 2)
            zombie.send(1, Kind.CONTRIBUTION, 2)
            new.send(0, Kind.CONTRIBUTION, 3)
            await until(lambda: 3 in inbox.numbers)
            await asyncio.sleep(0.05)
            assert inbox.numbers == [1, 3]
            assert connected == [(2, 1)]
            await until(lambda: zombie.superseded)

    run(scenario)


def test_a_member_that_stood_still_gives_up_no_connection() -> None:
    async def scenario() -> None:
        async with joined(DirectWorld(2, silence_s=0.4), MADE["unix"]) as (a, b):
            lost: list[int] = []
            inbox = Inbox(b)
            for mesh in (a, b):
                mesh.on_lost.append(lost.append)
            await asyncio.sleep(0.2)  # it watches
            time.sleep(1.0)  # noqa: ASYNC251 - nothing runs in this process
            for n in range(8):
                await asyncio.sleep(0.1)
                a.send(1, Kind.CONTRIBUTION, n)
            await until(lambda: inbox.numbers == list(range(8)))
            assert lost == []

    run(scenario)


def test_an_older_attempt_is_refused() -> None:
    async def scenario() -> None:
        world = DirectWorld(2)
        a, new = await world.join(0), await world.join(1, attempt=4)
        await all_connected(a, new)
        late = await world.join(1, attempt=3)
        await until(lambda: late.superseded)
        assert not late.connected(0)
        assert a.attempt_of(1) == 4
        for mesh in world.meshes:
            await mesh.close()

    run(scenario)


def test_two_that_cannot_connect_talk_through_a_third() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        network.partition(0, 1)
        world = DirectWorld(3, network=network)
        async with joined(world) as (a, b, _):
            assert a.transport_of(1) == "forwarded"
            inbox = Inbox(b)
            for n in range(20):
                a.send(1, Kind.CONTRIBUTION, n, buffers=[bytes([n]) * 1000])
            await until(lambda: len(inbox.got) == 20)
            assert inbox.numbers == list(range(20))
            assert [body for _, _, body in inbox.got] == [bytes([n]) * 1000 for n in range(20)]
            network.heal(0, 1)
            await until(lambda: a.transport_of(1) == "simulated" == b.transport_of(0))
            a.send(1, Kind.CONTRIBUTION, 99)
            await until(lambda: inbox.numbers[-1] == 99)

    run(scenario)


def test_a_zombie_is_refused_through_a_third_member_too() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        network.partition(0, 1)
        world = DirectWorld(3, network=network)
        async with joined(world) as (a, zombie, c):
            inbox = Inbox(a)
            new = await world.join(1, attempt=1)
            await all_connected(a, new, c)
            await until(lambda: a.attempt_of(1) == 1)
            zombie.send(0, Kind.CONTRIBUTION, 1)
            new.send(0, Kind.CONTRIBUTION, 2)
            await until(lambda: 2 in inbox.numbers)
            await asyncio.sleep(0.02)
            assert inbox.numbers == [2]

    run(scenario)


def test_without_a_route_the_caller_is_told() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        world = DirectWorld(2, network=network)
        async with joined(world) as (a, b):
            lost: list[int] = []
            a.on_lost.append(lost.append)
            network.partition(0, 1)
            await until(lambda: not a.connected(1) and not b.connected(0))
            assert lost == [1]
            assert not a.send(1, Kind.CONTRIBUTION)
            again: list[tuple[int, int]] = []
            a.on_connect.append(lambda rank, attempt: again.append((rank, attempt)))
            network.heal(0, 1)
            await until(lambda: a.connected(1) and b.connected(0))
            assert again == [(1, 0)]

    run(scenario)


def test_a_pair_without_a_third_talks_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_route, "STORE_AFTER_S", 0.05)

    async def scenario() -> None:
        network = MemoryNetwork()
        network.partition(0, 1)
        world = DirectWorld(2, network=network)
        async with joined(world) as (a, b):
            assert a.transport_of(1) == "store" == b.transport_of(0)
            inbox = Inbox(b)
            for n in range(20):
                assert a.send(1, Kind.CONTRIBUTION, n, 7, b"x" * n, [bytes([n]) * 1000, b"end"])
            await until(lambda: len(inbox.got) == 20)
            assert inbox.numbers == list(range(20))
            assert inbox.got[3] == (0, inbox.got[3][1], bytes([3]) * 1000 + b"end")
            assert inbox.got[3][1].extra == b"xxx"
            network.heal(0, 1)
            await until(lambda: a.transport_of(1) == "simulated" == b.transport_of(0))
            network.partition(0, 1)
            await until(lambda: a.transport_of(1) == "store" == b.transport_of(0))
            a.send(1, Kind.CONTRIBUTION, 21)
            await until(lambda: inbox.numbers[-1] == 21)
            new = await world.join(1, attempt=1)
            await until(lambda: a.attempt_of(1) == 1 and a.connected(1) and new.connected(0))
            b.send(0, Kind.CONTRIBUTION, 22)
            got = Inbox(a)
            new.send(0, Kind.CONTRIBUTION, 23)
            await until(lambda: got.numbers == [23])

    run(scenario)


def test_a_connection_over_a_long_way_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[str] = []
    dial = MemoryTransport.dial

    async def counted(self: MemoryTransport, address: str, token: str, *, timeout_s: float) -> Connection:
        dialled.append(address)
        return await dial(self, address, token, timeout_s=timeout_s)

    monkeypatch.setattr(MemoryTransport, "dial", counted)

    async def scenario() -> None:
        world = DirectWorld(3, network=MemoryNetwork(latency_s=0.2))
        async with joined(world):
            await asyncio.sleep(60)  # of virtual time
            assert len(dialled) == 3

    simulation.run(scenario())


def test_a_member_that_has_gone_has_no_route_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_route, "STORE_AFTER_S", 0.05)

    async def scenario() -> None:
        network = MemoryNetwork()
        network.partition(0, 1)
        world = DirectWorld(2, network=network, silence_s=0.3)
        async with joined(world) as (a, b):
            lost: list[int] = []
            a.on_lost.append(lost.append)
            await b.close()
            await until(lambda: not a.connected(1) and lost == [1])

    simulation.run(scenario())


def test_a_silent_connection_is_given_up() -> None:
    async def scenario() -> None:
        network = MemoryNetwork()
        world = DirectWorld(3, network=network, silence_s=0.2)
        async with joined(world) as (a, b, _):
            network.partition(0, 1, silent=True)
            assert a.transport_of(1) == "simulated"
            await until(lambda: a.transport_of(1) == "forwarded" == b.transport_of(0))
            assert a.transport_of(2) == "simulated"

    simulation.run(scenario())


@pytest.mark.parametrize("kind", ["shared", "unix", "tcp"])
def test_a_lost_connection_is_made_again(kind: str) -> None:
    async def scenario() -> None:
        async with joined(DirectWorld(2), MADE[kind]) as (a, b):
            connected: list[tuple[int, int]] = []
            b.on_connect.append(lambda rank, attempt: connected.append((rank, attempt)))
            connection = a._peers[1].connection
            assert isinstance(connection, Connection)
            connection.close()
            a.on_closed(connection, "broken by the test")
            await until(lambda: a.connected(1) and b.connected(0) and connected == [(0, 0)])
            inbox = Inbox(b)
            a.send(1, Kind.CONTRIBUTION, 1)
            await until(lambda: inbox.numbers == [1])

    run(scenario)


def test_requests_are_answered_or_fail() -> None:
    async def scenario() -> None:
        world = DirectWorld(3)
        async with joined(world) as (a, b, c):

            async def double(rank: int, head: Head, body: memoryview) -> list[bytes]:
                if head.number == 13:
                    raise LinkFailed("not here")
                return [head.extra, bytes(body), bytes(body)]

            b.answer(Kind.STATE, double)
            answers = await asyncio.gather(*(a.request(1, Kind.STATE, b"x", [bytes([n])], number=n, timeout_s=5) for n in range(5)))
            assert [bytes(x) for x in answers] == [b"x" + bytes([n, n]) for n in range(5)]
            with pytest.raises(LinkFailed, match="no answer"):
                await a.request(1, Kind.STATE, number=13, timeout_s=5)
            with pytest.raises(LinkFailed, match="no answer"):
                await a.request(2, Kind.STATE, timeout_s=5)

            async def never(rank: int, head: Head, body: memoryview) -> list[bytes]:
                await asyncio.Event().wait()
                return []

            c.answer(Kind.STATUS, never)
            with pytest.raises(LinkFailed, match=r"within 0\.05 s"):
                await a.request(2, Kind.STATUS, timeout_s=0.05)
            waiting = asyncio.create_task(a.request(2, Kind.STATUS, timeout_s=30))
            await asyncio.sleep(0.01)
            await c.close()
            with pytest.raises(LinkFailed, match="lost"):
                await waiting

    simulation.run(scenario())


@pytest.mark.parametrize(
    ("machine", "address", "reached"),
    [
        ("here", "10.0.0.2/5000", True),
        ("there", "10.0.0.2/5000", False),
        ("there", "10.0.0.3/5000", True),
        ("there", "127.0.0.1/5000", False),
        ("here", "127.0.0.1/5000", True),
    ],
)
def test_an_address_within_every_machine_is_of_no_use_between_two(machine: str, address: str, reached: bool) -> None:
    own = Endpoint(rank=0, attempt=0, machine="here", addresses={"tcp": "10.0.0.2/6000"})
    theirs = Endpoint(rank=1, attempt=0, machine=machine, addresses={"tcp": address})
    assert TcpTransport("10.0.0.2").reaches(own, theirs) == reached


def test_strangers_and_other_runs_get_no_connection() -> None:
    async def scenario() -> None:
        async with joined(DirectWorld(2), MADE["tcp"]) as (a, b):
            host, port = a._endpoint.addresses["tcp"].rsplit("/", 1)
            stranger = TcpTransport()
            with pytest.raises(LinkFailed):
                await stranger.dial(f"{host}/{port}", "another token", timeout_s=5)
            loop = asyncio.get_running_loop()
            with socket.create_connection((host, int(port))) as raw:
                raw.setblocking(False)
                await loop.sock_sendall(raw, b"GET / HTTP/1.1\r\n\r\n" * 20)
                greeting = await loop.sock_recv(raw, 100)
                assert greeting.startswith(b"ephemeron-rpc")
            inbox = Inbox(a)
            b.send(0, Kind.CONTRIBUTION, 1)
            await until(lambda: inbox.numbers == [1])

    run(scenario)


def test_a_member_that_is_announced_and_dead_does_not_stop_others() -> None:
    async def scenario() -> None:
        world = DirectWorld(3)
        dead = await world.join(1, transports=[UnixTransport()])
        await dead.close()
        a, c = await world.join(0, transports=[UnixTransport()]), await world.join(2, transports=[UnixTransport()])
        await all_connected(a, c)
        assert not a.connected(1)
        b = await world.join(1, attempt=1, transports=[UnixTransport()])
        await all_connected(a, b, c)
        for mesh in world.meshes:
            await mesh.close()

    run(scenario)


# -- successors that connect before they are members --------------------------------------------------------


def linked(mesh: Mesh, rank: int, attempt: int) -> bool:
    """Whether a mesh is connected to an attempt, which may be no member yet."""
    peer = mesh._peers[rank]
    return peer.attempt == attempt or (peer.successor is not None and peer.successor.attempt == attempt)


def test_a_waiting_successor_takes_its_predecessors_place_at_once() -> None:
    async def scenario() -> None:
        world = DirectWorld(3)
        async with joined(world) as meshes:
            successor = await world.join(1, 1, waits=True)
            await until(lambda: all(linked(meshes[r], 1, 1) and linked(successor, r, 0) for r in (0, 2)))
            assert [mesh.attempt_of(1) for mesh in meshes] == [0, 0, 0]
            assert not successor.connected(0)
            assert not successor.send(0, Kind.CONTRIBUTION, 1)
            old, new, others = Inbox(meshes[1]), Inbox(successor), [Inbox(meshes[0]), Inbox(meshes[2])]
            assert meshes[0].send(1, Kind.CONTRIBUTION, 2)
            await until(lambda: old.numbers == [2])
            connected: list[tuple[int, int]] = []
            meshes[0].on_connect.append(lambda rank, attempt: connected.append((rank, attempt)))
            successor.become_member(world.store)
            assert successor.send(0, Kind.CONTRIBUTION, 3), "no connection has to be made first"
            assert successor.send(2, Kind.CONTRIBUTION, 4)
            assert meshes[1].send(0, Kind.CONTRIBUTION, 5), "its predecessor does not know yet"
            await until(lambda: [i.numbers for i in others] == [[3], [4]])
            assert connected == [(1, 1)]
            assert meshes[0].send(1, Kind.CONTRIBUTION, 6)
            await until(lambda: new.numbers == [6])
            await until(lambda: meshes[1].superseded or not meshes[1].send(0, Kind.CONTRIBUTION, 7))
            assert old.numbers == [2]
            assert [i.numbers for i in others] == [[3], [4]]

    run(scenario)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_all_hand_off_at_once(order: list[int]) -> None:
    async def scenario() -> None:
        world = DirectWorld(3)
        async with joined(world):
            after = list(await asyncio.gather(*(world.join(r, 1, waits=True) for r in range(3))))
            await until(lambda: all(linked(a, b.rank, 1) for a in after for b in after if a is not b))
            inboxes = [Inbox(mesh) for mesh in after]
            for mesh in after:
                mesh.on_connect.append(lambda rank, attempt, own=mesh: own.send(rank, Kind.CONTRIBUTION, own.rank, attempt))
            for rank in order:
                after[rank].become_member(world.store)
            await until(lambda: all(set(i.numbers) == {0, 1, 2} - {n} for n, i in enumerate(inboxes)))

    run(scenario)


def test_a_member_that_came_meanwhile_is_found() -> None:
    async def scenario() -> None:
        world = DirectWorld(3)
        async with joined(world) as meshes:
            successor = await world.join(1, 1, waits=True)
            await until(lambda: linked(meshes[0], 1, 1) and linked(successor, 2, 0))
            await meshes[2].close()
            replacement = await world.join(2, 1)
            await until(lambda: replacement.attempt_of(1) == 0)
            successor.become_member(world.store)
            inbox = Inbox(replacement)
            await until(lambda: successor.send(2, Kind.CONTRIBUTION, 1) and replacement.attempt_of(1) == 1)
            await until(lambda: 1 in inbox.numbers)

    run(scenario)


def test_a_waiting_successor_is_refused_after_a_newer_attempt() -> None:
    async def scenario() -> None:
        world = DirectWorld(2)
        async with joined(world) as meshes:
            late = await world.join(1, 1, waits=True)
            await until(lambda: linked(meshes[0], 1, 1))
            newest = await world.join(1, 2)
            await until(lambda: meshes[0].attempt_of(1) == 2)
            inbox = Inbox(meshes[0])
            late.become_member(world.store)
            late.send(0, Kind.CONTRIBUTION, 1)
            await until(lambda: late.superseded)
            assert newest.send(0, Kind.CONTRIBUTION, 2)
            await until(lambda: inbox.numbers == [2])

    run(scenario)
