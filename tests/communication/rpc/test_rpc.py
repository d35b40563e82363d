"""Calls over real sockets on loopback."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ephemeron.communication.rpc import Client, FrameLimits, Options, Server
from ephemeron.errors import ProtocolError, RemoteError, TokenRefused

Reply = tuple[dict[str, Any], list[Any]]


class Handlers:
    """What the server of these tests can do; records what happened to handlers that hang."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, method: str, params: dict[str, Any], buffers: list[memoryview]) -> Reply:
        match method:
            case "echo":
                return params, list(buffers)
            case "fail":
                raise KeyError("no such thing")
            case "big":
                return {}, [bytes(params["n"])]
            case "wait":
                await self.release.wait()
                return {"n": params["n"]}, []
            case "hang":
                self.entered.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
        return {"strange": {1, 2}}, []


@asynccontextmanager
async def pair(**limits: Any) -> AsyncIterator[tuple[Handlers, Server, Client]]:
    handlers = Handlers()
    server = Server(handlers, token="t", **limits)
    host, port = await server.listen_tcp()
    client = await Client.connect_tcp(host, port, token="t")
    try:
        yield handlers, server, client
    finally:
        await client.close()
        await server.close()


def head(*, kind: int = 1, flags: int = 0, segment: int = 0, tag: int = 0, count: int = 0, data: int = 0) -> bytes:
    return struct.pack("!4sBBHQIIQI", b"EPH2", kind, flags, segment, 1_000, tag, count, data, 0)


def table(*entries: tuple[int, int, int, int]) -> bytes:
    return b"".join(struct.pack("!QQBB", *entry) for entry in entries)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(main())


async def port_of(server: Server) -> int:
    return (await server.listen_tcp())[1]


def test_parameters_and_buffers_come_back() -> None:
    async def scenario() -> None:
        async with pair() as (_, _, client):
            floats = np.arange(1000, dtype="f4")
            sent = [b"", b"one", bytearray(b"two" * 30_000), floats.data, b""]
            reply, buffers = await client.call("echo", {"a": [1, None, "ü"], "b": {"c": 1.5}}, sent)
            assert reply == {"a": [1, None, "ü"], "b": {"c": 1.5}}
            assert [bytes(b) for b in buffers] == [b"", b"one", b"two" * 30_000, floats.tobytes(), b""]
            assert await client.call("echo") == ({}, [])

    run(scenario)


def test_a_large_buffer_there_and_back() -> None:
    async def scenario() -> None:
        async with pair() as (_, _, client):
            data = np.random.default_rng(0).integers(0, 256, 47_000_000, dtype=np.uint8)
            _, (back,) = await client.call("echo", {}, [data.data])
            assert np.array_equal(np.frombuffer(back, np.uint8), data)

    run(scenario)


def test_large_and_small_calls_are_interleaved() -> None:
    async def scenario() -> None:
        async with pair() as (_, _, client):

            async def one(i: int) -> None:
                data = bytes([i]) * (i * 20_000)
                reply, (back,) = await client.call("echo", {"i": i}, [data])
                assert reply == {"i": i}
                assert back == data

            await asyncio.gather(*(one(i) for i in range(60)))

    run(scenario)


def test_calls_overtake_each_other() -> None:
    async def scenario() -> None:
        async with pair() as (handlers, _, client):
            slow = [asyncio.create_task(client.call("wait", {"n": n})) for n in range(20)]
            assert (await client.call("echo", {"n": -1}))[0] == {"n": -1}
            assert not any(task.done() for task in slow)
            handlers.release.set()
            assert [(await task)[0]["n"] for task in slow] == list(range(20))

    run(scenario)


def test_unix_sockets_work_and_replace_a_stale_file(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    async def scenario() -> None:
        server = Server(Handlers(), token="t")
        await server.listen_unix(path)
        client = await Client.connect_unix(path, token="t")
        assert (await client.call("echo", {"a": 1}))[0] == {"a": 1}
        await client.close()
        await server.close()

    run(scenario)
    assert not path.exists()


def test_what_a_handler_raises_arrives_by_name() -> None:
    async def scenario() -> None:
        async with pair() as (_, _, client):
            with pytest.raises(RemoteError, match="no such thing") as caught:
                await client.call("fail")
            assert caught.value.type == "KeyError"
            with pytest.raises(RemoteError, match="TypeError"):
                await client.call("a reply that is no JSON")
            assert (await client.call("echo", {"still": "alive"}))[0] == {"still": "alive"}

    run(scenario)


def test_a_wrong_token_is_refused_before_any_call() -> None:
    async def scenario() -> None:
        handlers = Handlers()
        server = Server(handlers, token="right")
        port = await port_of(server)
        with pytest.raises(TokenRefused):
            await Client.connect_tcp("127.0.0.1", port, token="wrong")
        friend = await Client.connect_tcp("127.0.0.1", port, token="right")
        await friend.call("echo")
        await friend.close()
        await server.close()

    run(scenario)


def test_an_impostor_server_learns_nothing_and_is_not_called() -> None:
    async def scenario() -> None:
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(48))  # repeats the client's own challenge to it
            proof = await reader.readexactly(32)
            writer.write(proof)  # and the client's own proof
            rest = await reader.read()
            writer.close()
            heard.set_result(rest)

        fake = await asyncio.start_server(impostor, "127.0.0.1", 0)
        with pytest.raises(TokenRefused):
            await Client.connect_tcp("127.0.0.1", fake.sockets[0].getsockname()[1], token="t")
        assert await heard == b""
        fake.close()

    run(scenario)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20, bytes(500), b"\xff" * 500])
def test_garbage_closes_the_connection_and_nothing_else(garbage: bytes) -> None:
    async def scenario() -> None:
        async with pair() as (_, server, client):
            reader, writer = await asyncio.open_connection("127.0.0.1", await port_of(server))
            writer.write(garbage)
            try:
                await reader.read()
            except ConnectionError:
                pass
            writer.close()
            assert (await client.call("echo", {"a": 1}))[0] == {"a": 1}

    run(scenario)


@pytest.mark.parametrize(
    "frame",
    [
        b"NOPE" + bytes(32),
        head(kind=10),
        head(kind=0),
        head(flags=4),
        head(tag=(1 << 20) + 1),
        head(count=4097),
        head(count=1, data=1 << 40),
        head(data=64),
        head(tag=2) + b"[]",
        head(tag=7) + b"no json",
        head(tag=20_000) + b"[" * 20_000,
        head(count=1, data=1) + table((1, 1, 9, 0)),
        head(count=1, data=1) + table((1, 2, 0, 0)),
        head(count=1, data=2) + table((1, 2, 0, 0)),
        head(count=1, data=1) + table((1 << 40, 1, 0, 1)),
        head(count=1, data=1) + table((0, 1, 0, 1)),
        head(count=1, data=1) + table((1, 1, 0, 77)) + b"x",
        head(count=1, data=1, segment=1) + table((1, 1, 0, 0)),
        head(kind=2, tag=2) + b"{}",
        head(kind=1, tag=2) + b"{}",
    ],
)
def test_a_broken_frame_of_a_known_client_closes_its_connection(frame: bytes) -> None:
    async def scenario() -> None:
        async with pair() as (_, _, client):
            pending = asyncio.create_task(client.call("wait", {"n": 1}))
            await client.call("echo")
            await asyncio.get_running_loop().sock_sendall(client._peer.wire.sock, frame)
            with pytest.raises(ConnectionError):
                await pending
            assert not client.connected

    run(scenario)


def test_sizes_are_bounded_both_ways() -> None:
    async def scenario() -> None:
        async with pair(options=Options(limits=FrameLimits(max_frame=1_000_000))) as (_, _, client):
            with pytest.raises(RemoteError, match="exceeds 1000000"):
                await client.call("big", {"n": 1_000_001})
            with pytest.raises(ProtocolError):
                await client.call("echo", {"text": "x" * (1 << 20)})
            await client.call("big", {"n": 1_000_000})
            with pytest.raises(ConnectionError):
                await client.call("echo", {}, [bytes(1_000_001)])

    run(scenario)


def test_cancelling_a_call_cancels_its_handler() -> None:
    async def scenario() -> None:
        async with pair() as (handlers, _, client):
            call = asyncio.create_task(client.call("hang"))
            await handlers.entered.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await handlers.cancelled.wait()
            assert (await client.call("echo", {"a": 1}))[0] == {"a": 1}

    run(scenario)


def test_cancelling_while_a_large_request_leaves_keeps_the_connection_whole() -> None:
    async def scenario() -> None:
        async with pair() as (_, _, client):
            for turns in range(1, 12):
                call = asyncio.create_task(client.call("echo", {}, [bytes(20_000_000)]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                assert (await client.call("echo", {"a": turns}))[0] == {"a": turns}

    run(scenario)


def test_a_client_that_leaves_has_its_handlers_cancelled() -> None:
    async def scenario() -> None:
        async with pair() as (handlers, server, client):
            call = asyncio.create_task(client.call("hang"))
            await handlers.entered.wait()
            await client.close()
            with pytest.raises(ConnectionError):
                await call
            await handlers.cancelled.wait()
            with pytest.raises(ConnectionError):
                await client.call("echo")
            other = await Client.connect_tcp("127.0.0.1", await port_of(server), token="t")
            await other.call("echo")
            await other.close()

    run(scenario)


def test_a_server_that_leaves_fails_pending_calls() -> None:
    async def scenario() -> None:
        async with pair() as (handlers, server, client):
            call = asyncio.create_task(client.call("hang"))
            await handlers.entered.wait()
            await server.close()
            with pytest.raises(ConnectionError):
                await call
            assert handlers.cancelled.is_set()
            assert not client.connected

    run(scenario)


def test_nobody_listening_and_a_silent_listener() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            with pytest.raises(ConnectionError, match="no answer"):
                await Client.connect_tcp("127.0.0.1", port, token="t", timeout_s=0.05)
        with pytest.raises(ConnectionError):
            await Client.connect_tcp("127.0.0.1", port, token="t")

    run(scenario)


def test_a_server_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="token"):
        Server(Handlers.__call__, token="")  # type: ignore[arg-type]
