"""Connections by WebSocket through endpoints of members."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("websockets", "15", reason="no WebSocket; pip install 'ephemeron[aws-microvm]'")

import websockets.asyncio.client
from rendezvous_world import RUN_TOKEN, TIMEOUT_S, Inbox

from ephemeron.communication.direct.connection import Connection, LinkFailed
from ephemeron.communication.direct.websocket import EndpointAccess, WebSocketTransport


class Loopback(EndpointAccess):
    """Endpoints of this machine, which let everybody in."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def own(self, port: int) -> str | None:
        return f"127.0.0.1:{port}"

    async def open(self, address: str) -> tuple[str, Mapping[str, str]]:
        self.asked.append(address)
        return f"ws://{address}/", {"X-Test": "1"}


class Closed(Loopback):
    async def own(self, port: int) -> str | None:
        raise LinkFailed("no permission")


@asynccontextmanager
async def listening(token: str = RUN_TOKEN) -> AsyncIterator[tuple[WebSocketTransport, str, asyncio.Queue[Connection]]]:
    transport, accepted = WebSocketTransport(Loopback(), host="127.0.0.1"), asyncio.Queue[Connection]()
    address = await transport.listen(token, accepted.put_nowait)
    assert address is not None
    try:
        yield transport, address, accepted
    finally:
        await transport.close()


def run(work: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await work()

    asyncio.run(main())


def test_messages_pass_in_both_directions() -> None:
    async def main() -> None:
        async with listening() as (transport, address, accepted):
            dialled = await WebSocketTransport(Loopback(), host="127.0.0.1").dial(address, RUN_TOKEN, timeout_s=TIMEOUT_S)
            ours, theirs = Inbox(dialled), Inbox(await accepted.get())
            assert (ours.connection.transport, ours.connection.dialled) == ("websocket", True)
            assert theirs.connection.dialled is False
            body = os.urandom(5_000_000)
            ours.send(1, body)
            theirs.send(2, body[::-1])
            assert await theirs.receive() == (1, body)
            assert await ours.receive() == (2, body[::-1])
            await transport.close()  # listening ends, the connection stays
            ours.send(3, b"x")
            assert await theirs.receive() == (3, b"x")
            ours.connection.close()
            await theirs.closed.wait()

    run(main)


def test_the_other_end_must_know_the_run_s_token() -> None:
    async def main() -> None:
        async with listening() as (_, address, accepted):
            dialler = WebSocketTransport(Loopback(), host="127.0.0.1")
            with pytest.raises(LinkFailed, match="token"):
                await dialler.dial(address, "another", timeout_s=TIMEOUT_S)
            assert accepted.empty()

    run(main)


@pytest.mark.parametrize("said", ["text", b"garbage" * 100, b"x" * 2_000_000], ids=["text", "garbage", "too-long"])
def test_what_is_no_message_of_ours_ends_its_own_connection(said: str | bytes) -> None:
    async def main() -> None:
        async with listening() as (transport, address, accepted):
            async with websockets.asyncio.client.connect(f"ws://{address}/", proxy=None) as stranger:
                await stranger.send(said)
                await stranger.wait_closed()
            assert accepted.empty()
            (await transport.dial(address, RUN_TOKEN, timeout_s=TIMEOUT_S)).close()
            (await accepted.get()).close()

    run(main)


def test_nobody_there() -> None:
    async def main() -> None:
        async with listening() as (_, address, _):
            pass
        dialler = WebSocketTransport(Loopback(), host="127.0.0.1")
        with pytest.raises(LinkFailed, match="127"):
            await dialler.dial(address, RUN_TOKEN, timeout_s=TIMEOUT_S)
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        with pytest.raises(LinkFailed, match="not in time"):
            await dialler.dial(f"127.0.0.1:{port}", RUN_TOKEN, timeout_s=0.2)
        silent.close()

    run(main)


def test_a_member_whose_platform_does_not_tell_is_not_announced() -> None:
    async def main() -> None:
        with pytest.raises(LinkFailed, match="permission"):
            await WebSocketTransport(Closed(), host="127.0.0.1").listen(RUN_TOKEN, lambda connection: None)

    run(main)
