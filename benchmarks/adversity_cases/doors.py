"""Strangers at everything that listens, before the token; and what is said where no token, or an odd one, is given."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.adversity_cases import case
from ephemeron.communication.direct.rendezvous_protocol import MessageSocket, Register, Registered, group_of
from ephemeron.communication.direct.rendezvous_service import RendezvousService
from ephemeron.communication.direct.transport import TcpTransport
from ephemeron.communication.rpc import BlockingClient, BlockingServer, Client, Server
from ephemeron.communication.rpc.http import HttpRequest, Response, ask, listen
from ephemeron.errors import JobError, TokenRefused
from ephemeron.sparse.store import Sum
from ephemeron.sparse.store.client import SparseStore
from ephemeron.sparse.store.server import ShardServer
from ephemeron.sparse.store.state import ShardState

KIND = "before the token"
TOKEN = "the token of these cases"
STRANGERS = 400
Served = tuple[int, Callable[[], Awaitable[None]], Callable[[], Awaitable[Any]]]
"""Port; a member's visit; what ends the server."""


async def _rpc() -> Served:
    async def answer(method: str, params: Any, buffers: Any) -> Any:
        return {}, []

    server = Server(answer, token=TOKEN)
    port = (await server.listen_tcp())[1]

    async def visit() -> None:
        client = await Client.connect_tcp("127.0.0.1", port, token=TOKEN)
        await client.call("any")
        await client.close()

    return port, visit, server.close


async def _threads() -> Served:
    server = BlockingServer(lambda *_: ({}, []), token=TOKEN)
    port = server.listen_tcp()[1]

    def call() -> None:
        client = BlockingClient.connect_tcp("127.0.0.1", port, token=TOKEN)
        client.call("any")
        client.close()

    return port, lambda: asyncio.to_thread(call), lambda: asyncio.to_thread(server.close)


async def _direct() -> Served:
    transport = TcpTransport()
    address = await transport.listen(TOKEN, lambda connection: connection.close())
    assert address is not None

    async def visit() -> None:
        (await TcpTransport().dial(address, TOKEN, timeout_s=20)).close()

    return int(address.rpartition("/")[2]), visit, transport.close


async def _rendezvous() -> Served:
    service = RendezvousService(TOKEN)
    port = (await service.listen())[1]

    async def visit() -> None:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        channel = MessageSocket(sock)
        await channel.prove(TOKEN, client=True)
        await channel.send(Register(group=group_of("a run's"), name="me"))
        assert isinstance(await channel.receive(), Registered)
        channel.close()

    return port, visit, service.close


async def _sparse() -> Served:
    server = ShardServer(ShardState(0, 1), token=TOKEN)
    port = (await server.listen())[1]

    async def visit() -> None:
        async with await SparseStore.connect([f"127.0.0.1:{port}"], TOKEN) as store:
            await store.set("key", b"value")

    return port, visit, server.close


async def _http() -> Served:
    async def answer(request: HttpRequest) -> Response:
        return Response(body=request.body)

    listener = await listen(answer)

    async def visit() -> None:
        assert (await ask("127.0.0.1", listener.port, "POST", "/", body=b"x")).body == b"x"

    return listener.port, visit, listener.close


async def _dashboard() -> Served:
    import uvicorn

    from ephemeron.communication.unproved import UnprovedConnections
    from ephemeron.dashboard.access import Access
    from ephemeron.dashboard.app import make_app
    from ephemeron.dashboard.library import Library
    from ephemeron.dashboard.request_limits import limited_protocol
    from ephemeron.dashboard.server import listen as listening_at

    listening = listening_at("127.0.0.1", 0)
    port = int(listening.getsockname()[1])
    app = Access(make_app(Library([Path(tempfile.gettempdir())])), token=TOKEN, host="127.0.0.1", port=port)
    http = limited_protocol(UnprovedConnections())
    server = uvicorn.Server(uvicorn.Config(app, http=http, ws="none", log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    running = asyncio.create_task(server.serve(sockets=[listening]))

    async def visit() -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert (await ask("127.0.0.1", port, "GET", "/api/session", headers=headers)).status == 200

    async def close() -> None:
        server.should_exit = True
        await running

    return port, visit, close


LISTENERS = {
    "rpc server": _rpc,
    "rpc server with threads": _threads,
    "direct links": _direct,
    "rendezvous": _rendezvous,
    "sparse store": _sparse,
    "HTTP listener": _http,
    "dashboard": _dashboard,
}
GREETINGS = {
    "silence": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: ",
    "garbage": bytes(range(256)) * 8,
    "nesting": b"[" * 60_000,
    "a length of 2^63": b"EPH2" + b"\xff" * 44,
}


def _besieged(open_it: Callable[[], Awaitable[Served]], greeting: bytes) -> None:
    async def main() -> None:
        port, visit, close = await open_it()
        try:
            with ExitStack() as stack:
                for _ in range(STRANGERS):
                    sock = stack.enter_context(await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 20))
                    with suppress(OSError):
                        sock.sendall(greeting)
                await asyncio.wait_for(visit(), 20)
            await asyncio.wait_for(visit(), 20)
        finally:
            await close()

    asyncio.run(main())


for _name, _open in LISTENERS.items():
    for _said, _greeting in GREETINGS.items():

        @case(KIND, f"{_name}: {STRANGERS} connections with {_said}, then a member")
        def _(open_it: Callable[[], Awaitable[Served]] = _open, greeting: bytes = _greeting) -> None:
            _besieged(open_it, greeting)


def _asked(data: Callable[[int], bytes]) -> bytes:
    """First line of the dashboard's answer to these bytes; empty: it closed the connection."""

    async def main() -> bytes:
        port, visit, close = await _dashboard()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data(port))
            line = await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            await asyncio.wait_for(visit(), 20)
            return line
        finally:
            await close()

    return asyncio.run(main())


def _request(port: int, *headers: str, line: str = "GET /api/session", body: bytes = b"") -> bytes:
    head = [f"{line} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


for _text in ("\\" * 60_000, '"' * 60_000, ";" * 60_000, "=" * 60_000, "\\012" * 15_000, ""):

    @case(KIND, f"dashboard: a cookie of {len(_text)} characters {_text[:4]!r}")
    def _(text: str = _text) -> None:
        line = _asked(lambda port: _request(port, f'Cookie: ephemeron-{port}="{text}'))
        assert b" 401 " in line or b" 400 " in line, line


for _body, _status in ((b"[" * 60_000, 400), (b"[" * 200_000, 413), (b" " * (8 << 20), 413), (b"\xff", 400), (b"{}", 404)):

    @case(KIND, f"dashboard: a body of {len(_body)} bytes {_body[:4]!r}")
    def _(body: bytes = _body, status: int = _status) -> None:
        line = _asked(lambda port: _request(port, f"Authorization: Bearer {TOKEN}", line="POST /api/run/end", body=body))
        assert f" {status} ".encode() in line, line


TOKENS = "a token of another form"


def _with_store(work: Callable[[str], Awaitable[None]]) -> None:
    async def main() -> None:
        server = ShardServer(ShardState(0, 1), token=TOKEN)
        _, port = await server.listen()
        try:
            await asyncio.wait_for(work(f"127.0.0.1:{port}"), 20)
        finally:
            await server.close()

    asyncio.run(main())


for _token in (TOKEN.encode(), bytearray(TOKEN.encode()), TOKEN):

    @case(TOKENS, f"sparse store: the token as {type(_token).__name__}")
    def _(token: Any = _token) -> None:
        async def use(address: str) -> None:
            async with await SparseStore.connect([address], token) as store:
                await store.set("key", b"value")

        _with_store(use)


for _wrong in ("", b"", b"\xff", None, 7, b"wrong", TOKEN.encode() + b"\n"):

    @case(TOKENS, f"sparse store: {_wrong!r} is refused")
    def _(token: Any = _wrong) -> None:
        async def use(address: str) -> None:
            said = ""
            try:
                await SparseStore.connect([address], token)
            except (JobError, TokenRefused) as e:
                said = str(e)
            assert "token" in said, said or "connected"

        _with_store(use)


for _rows in (1 << 40, 1 << 50, 1 << 62):

    @case("an absurd size", f"sparse store: a table of {_rows} rows, then one of 10")
    def _(rows: int = _rows) -> None:
        async def use(address: str) -> None:
            async with await SparseStore.connect([address], TOKEN) as store:
                said = ""
                try:
                    await store.create("w", rows, optimizer=Sum())
                except JobError as e:
                    said = str(e)
                assert "rows" in said or "refuses" in said, said or "created"
                await store.create("v", 10, optimizer=Sum())

        _with_store(use)
