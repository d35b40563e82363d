"""Silent strangers shut nobody out, wherever something listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing, suppress
from typing import Any

import pytest

from ephemeron.communication.direct.rendezvous_protocol import MessageSocket, Register, Registered, group_of
from ephemeron.communication.direct.rendezvous_service import RendezvousService, ServiceLimits
from ephemeron.communication.direct.transport import TcpTransport
from ephemeron.communication.rpc import BlockingClient, BlockingServer, Client, Server
from ephemeron.communication.rpc.http import HttpRequest, Response, ask, listen
from ephemeron.communication.unproved import UnprovedConnections, origin
from ephemeron.regions.communicator.network import RegionNetwork
from ephemeron.sparse.store.client import SparseStore
from ephemeron.sparse.store.server import ShardServer
from ephemeron.sparse.store.state import ShardState
from ephemeron.training.worker.spec import GroupNetwork

TOKEN = "a secret of these tests"
STRANGERS = 20
SMALL: dict[str, int] = {"in_all": 6, "per_address": 4}
Member = Callable[[], Awaitable[None]]
"""Connects with the token, and is answered."""


def test_the_oldest_goes_for_the_new_one() -> None:
    gone: list[str] = []
    connections = UnprovedConnections(in_all=3, per_address=2)
    names = {}
    for name, address in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("a3", "a"), ("c1", "c")):
        names[name] = connections.admit(address, lambda name=name: gone.append(name))  # type: ignore[misc]
    assert gone == ["a1", "b1"]  # the third of its address, then the oldest of all
    assert connections.count == 3
    for settle in (*names.values(), *names.values()):  # those that were dropped, and twice, too
        settle()
    assert connections.count == 0
    connections.admit("a", lambda: gone.append("a4"))
    connections.admit("a", lambda: gone.append("a5"))
    assert gone == ["a1", "b1"]


def test_an_origin_is_an_address_or_a_network_of_ipv6() -> None:
    class Socket:
        def __init__(self, family: socket.AddressFamily, host: str) -> None:
            self.family, self._host = family, host

        def getpeername(self) -> Any:
            return (self._host, 1)

    def of(family: socket.AddressFamily, host: str) -> str:
        return origin(Socket(family, host))  # type: ignore[arg-type]

    assert of(socket.AF_INET, "10.0.0.7") == "10.0.0.7"
    assert of(socket.AF_INET6, "::ffff:10.0.0.7") == "10.0.0.7"
    assert of(socket.AF_INET6, "2001:db8:1:2:3::4%eth0") == of(socket.AF_INET6, "2001:db8:1:2:ffff::1")
    assert of(socket.AF_INET6, "2001:db8:1:3::1") != of(socket.AF_INET6, "2001:db8:1:2::1")
    one, two = socket.socketpair()
    with one, two:
        assert origin(one) == ""


async def answered(method: str, params: Any, buffers: Any) -> tuple[dict[str, Any], list[Any]]:
    return {}, []


@asynccontextmanager
async def rpc_server() -> AsyncIterator[tuple[int, Member]]:
    server = Server(answered, token=TOKEN)
    server.unproved = UnprovedConnections(**SMALL)
    port = (await server.listen_tcp())[1]

    async def member() -> None:
        client = await Client.connect_tcp("127.0.0.1", port, token=TOKEN)
        await client.call("any")
        await client.close()

    yield port, member
    await server.close()


@asynccontextmanager
async def blocking_server() -> AsyncIterator[tuple[int, Member]]:
    with BlockingServer(lambda *_: ({}, []), token=TOKEN) as server:
        server.unproved = UnprovedConnections(**SMALL)
        port = server.listen_tcp()[1]

        def call() -> None:
            client = BlockingClient.connect_tcp("127.0.0.1", port, token=TOKEN)
            client.call("any")
            client.close()

        yield port, lambda: asyncio.to_thread(call)


@asynccontextmanager
async def direct_listener() -> AsyncIterator[tuple[int, Member]]:
    transport = TcpTransport()
    transport.unproved = UnprovedConnections(**SMALL)
    accepted: asyncio.Queue[Any] = asyncio.Queue()
    address = await transport.listen(TOKEN, accepted.put_nowait)
    assert address is not None

    async def member() -> None:
        connections = [await TcpTransport().dial(address, TOKEN, timeout_s=60), await accepted.get()]
        for connection in connections:
            connection.close()

    yield int(address.rpartition("/")[2]), member
    await transport.close()


@asynccontextmanager
async def rendezvous() -> AsyncIterator[tuple[int, Member]]:
    limits = ServiceLimits(unproved=SMALL["in_all"], unproved_per_address=SMALL["per_address"])
    service = RendezvousService(TOKEN, limits=limits)
    port = (await service.listen())[1]

    async def member() -> None:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        with closing(MessageSocket(sock)) as channel:
            await channel.prove(TOKEN, client=True)
            await channel.send(Register(group=group_of("a run's"), name="me"))
            assert isinstance(await channel.receive(), Registered)

    yield port, member
    await service.close()


@asynccontextmanager
async def sparse_store() -> AsyncIterator[tuple[int, Member]]:
    server = ShardServer(ShardState(0, 1), token=TOKEN)
    server.unproved = UnprovedConnections(**SMALL)
    port = (await server.listen())[1]

    async def member() -> None:
        async with await SparseStore.connect([f"127.0.0.1:{port}"], TOKEN) as store:
            await store.set("key", b"value")

    yield port, member
    await server.close()


@asynccontextmanager
async def http_listener() -> AsyncIterator[tuple[int, Member]]:
    async def answer(request: HttpRequest) -> Response:
        return Response(body=request.body)

    listener = await listen(answer)
    listener.unproved = UnprovedConnections(**SMALL)

    async def member() -> None:
        assert (await ask("127.0.0.1", listener.port, "POST", "/", body=b"x" * 100)).body == b"x" * 100

    yield listener.port, member
    await listener.close()


LISTENERS = [rpc_server, blocking_server, direct_listener, rendezvous, sparse_store, http_listener]


@pytest.mark.parametrize("first_bytes", [b"", b"GET /"], ids=["silent", "some bytes"])
@pytest.mark.parametrize("listener", LISTENERS, ids=lambda f: f.__name__)
def test_a_member_is_served_among_silent_strangers(
    listener: Callable[[], AbstractAsyncContextManager[tuple[int, Member]]], first_bytes: bytes
) -> None:
    async def main() -> None:
        async with listener() as (port, member):
            with ExitStack() as stack:
                strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(STRANGERS)]
                for stranger in strangers:
                    with suppress(ConnectionError):  # closed already
                        stranger.sendall(first_bytes)
                await member()
                # All but the last few have been closed, the oldest first, although none has come to its time limit.
                for stranger in strangers[: STRANGERS - SMALL["per_address"]]:
                    await asyncio.to_thread(read_to_the_end, stranger)

    asyncio.run(main())


def read_to_the_end(sock: socket.socket) -> None:
    sock.settimeout(60)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass


async def http_answer(port: int, data: bytes) -> bytes:
    """All that is answered to these bytes until the listener closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


def test_an_http_listener_bounds_bodies_time_and_nesting() -> None:
    async def answer(request: HttpRequest) -> Response:
        try:
            request.json()
        except ValueError as e:
            return Response(status=400, body=str(e).encode())
        return Response()

    async def main() -> None:
        listener, hasty = await listen(answer, max_body=300_000), await listen(answer, request_s=0.3)
        port = listener.port
        too_large = await http_answer(port, b"POST / HTTP/1.1\r\nContent-Length: 300001\r\n\r\n")
        assert b" 413 " in too_large.splitlines()[0]
        chunk = b"20000\r\n" + bytes(0x20000) + b"\r\n"
        chunked = await http_answer(port, b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + 3 * chunk)
        assert b" 413 " in chunked.splitlines()[0]
        nested = await ask("127.0.0.1", port, "POST", "/", body=b"[" * 200_000)
        assert (nested.status, nested.body) == (400, b"the JSON is nested too deeply")
        # Closed after their time, without an answer: half a head, half a body, nothing.
        for half in (b"GET / HT", b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nab", b""):
            assert await http_answer(hasty.port, half) == b""
        # Kept alive beyond that time.
        reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.5)
        writer.close()
        await listener.close()
        await hasty.close()

    asyncio.run(main())


def test_a_region_counts_handshakes_of_strangers() -> None:
    """With certificates the proof begins in the TLS handshake, before the calls."""
    network = RegionNetwork(GroupNetwork(listen="127.0.0.1:0"), token=TOKEN)
    network._unproved = UnprovedConnections(**SMALL)
    network._tls = SilentTls()  # type: ignore[assignment]

    async def main() -> None:
        async def accepted(sock: socket.socket, names: frozenset[str] | None) -> None:
            raise AssertionError("no stranger has a certificate")

        port = int((await network.open(accepted)).rpartition(":")[2])
        with ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(STRANGERS)]
            for stranger in strangers[: STRANGERS - SMALL["per_address"]]:
                await asyncio.to_thread(read_to_the_end, stranger)
            assert network._unproved.count == SMALL["per_address"]
        await network.close()

    asyncio.run(main())


class SilentTls:
    """A handshake with someone who says nothing."""

    async def secured(self, sock: socket.socket, *, peer: str | None, limit_s: float) -> Any:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_recv(sock, 1)
        raise ConnectionResetError


def test_nesting_ends_no_handler_of_functions() -> None:
    """Handlers of OpenFaaS and of MicroVMs take calls from gateways."""
    from ephemeron.errors import CorruptMessage
    from ephemeron.functions.aws_microvm.payload import RunPayload
    from ephemeron.functions.openfaas.handler import answering

    class Replica:
        busy = False

    request = HttpRequest(method="POST", path="/", headers={}, body=b"[" * 200_000)
    response: Any = asyncio.run(answering(Replica(), None)(request))  # type: ignore[arg-type, arg-type]
    assert response.status == 400
    with pytest.raises(CorruptMessage):
        RunPayload.from_text("[" * 200_000)
