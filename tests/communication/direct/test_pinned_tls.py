"""Encrypted connections between functions: what passes cannot be read, and nobody can sit in between."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="no maker of certificates; pip install 'ephemeron[tls]'")

from ephemeron.communication.direct import Connection, Head, LinkFailed
from ephemeron.communication.direct.message import Kind
from ephemeron.communication.direct.tls_socket import PinnedTls, wanted_tls
from ephemeron.communication.direct.transport import TcpTransport
from ephemeron.errors import JobError
from ephemeron.testing import TrainingWorld
from ephemeron.testing.direct_world import until
from tiny_job import JOB

TOKEN = "the run's token"
SECRET = b"a gradient that nobody else may read " * 50
Secure = Callable[[socket.socket, bool], Awaitable[socket.socket]]


class Received:
    """Handler of a connection."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def allocate(self, connection: Connection, head: Head, nbytes: int) -> None:
        return None

    def on_message(self, connection: Connection, head: Head, body: memoryview) -> None:
        self.bodies.append(bytes(body))

    def on_closed(self, connection: Connection, why: str) -> None:
        pass


class Between:
    """Somebody between two functions who sees what passes; `secure`: what he does to each of his two sockets."""

    def __init__(self, target: str, secure: Secure | None = None) -> None:
        self._target, self._secure = target.rpartition("/")[2], secure
        self.seen = b""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> str:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self._tasks.add(asyncio.create_task(self._accept()))
        return f"127.0.0.1/{self._server.getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        ours, _ = await loop.sock_accept(self._server)
        theirs = socket.socket()
        theirs.setblocking(False)
        await loop.sock_connect(theirs, ("127.0.0.1", int(self._target)))
        if self._secure is not None:
            ours, theirs = await asyncio.gather(self._secure(ours, False), self._secure(theirs, True))
        with ours, theirs:
            await asyncio.gather(self._pass(ours, theirs), self._pass(theirs, ours))

    async def _pass(self, one: socket.socket, other: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(one, 1 << 16):
            self.seen += data
            await loop.sock_sendall(other, data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(240):
            await scenario()

    asyncio.run(main())


@contextlib.asynccontextmanager
async def listening(tls: PinnedTls | None):  # type: ignore[no-untyped-def]
    transport, accepted = TcpTransport(tls=tls), list[Connection]()
    address = await transport.listen(TOKEN, accepted.append)
    try:
        yield address, accepted
    finally:
        for connection in accepted:
            connection.close()
        await transport.close()


async def sent(address: str, accepted: list[Connection], tls: PinnedTls | None) -> None:
    """Sends the secret through a new connection."""
    dialling, received = TcpTransport(tls=tls), Received()
    connection = await dialling.dial(address, TOKEN, timeout_s=20)
    await until(lambda: bool(accepted))
    accepted[0].start(received)
    connection.send(Head(Kind.OBJECT, 1, 0), [SECRET])
    await until(lambda: received.bodies == [SECRET])
    connection.close()
    await dialling.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_passes_can_be_read_only_where_it_is_not_encrypted(encrypted: bool) -> None:
    async def scenario() -> None:
        async with listening(PinnedTls() if encrypted else None) as (address, accepted):
            between = Between(address)
            async with between as through:
                await sent(through, accepted, PinnedTls() if encrypted else None)
            assert (SECRET[:30] in between.seen) != encrypted
            assert len(between.seen) > len(SECRET)

    run(scenario)


def test_who_sits_in_between_with_another_certificate_gets_no_connection() -> None:
    async def scenario() -> None:
        man = PinnedTls()

        async def secure(sock: socket.socket, dialled: bool) -> socket.socket:
            return (await man.secure(sock, "", dialled=dialled))[0]

        async with listening(PinnedTls()) as (address, accepted):
            between = Between(address, secure)
            async with between as through:
                with pytest.raises(LinkFailed, match="tcp"):
                    await TcpTransport(tls=PinnedTls()).dial(through, TOKEN, timeout_s=20)
            assert b"ephemeron" in between.seen, "the proofs have passed through him"
            assert not accepted

    run(scenario)


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True)])
def test_both_ends_must_want_it(here: bool, there: bool) -> None:
    async def scenario() -> None:
        async with listening(PinnedTls() if there else None) as (address, accepted):
            with pytest.raises(LinkFailed):
                await TcpTransport(tls=PinnedTls() if here else None).dial(address, TOKEN, timeout_s=3)
            assert not accepted

    run(scenario)


def test_another_token_is_refused_over_tls_too() -> None:
    async def scenario() -> None:
        async with listening(PinnedTls()) as (address, accepted):
            with pytest.raises(LinkFailed):
                await TcpTransport(tls=PinnedTls()).dial(address, "another run's", timeout_s=20)
            assert not accepted

    run(scenario)


def test_what_was_sent_last_arrives_although_the_sender_closes() -> None:
    async def scenario() -> None:
        async with listening(PinnedTls()) as (address, accepted):
            dialling, received = TcpTransport(tls=PinnedTls()), Received()
            connection = await dialling.dial(address, TOKEN, timeout_s=20)
            await until(lambda: bool(accepted))
            connection.send(Head(Kind.OBJECT, 1, 0), [bytes(3_000_000)])
            accepted[0].start(received)
            await connection.drained()
            connection.close()
            await dialling.close()
            await until(lambda: [len(body) for body in received.bodies] == [3_000_000])

    run(scenario)


def test_the_variable_switches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPHEMERON_DIRECT_TLS", raising=False)
    assert wanted_tls() is None
    monkeypatch.setenv("EPHEMERON_DIRECT_TLS", "0")
    assert wanted_tls() is None
    monkeypatch.setenv("EPHEMERON_DIRECT_TLS", "1")
    assert isinstance(wanted_tls(), PinnedTls)
    monkeypatch.setenv("EPHEMERON_DIRECT_TLS", "yes")
    with pytest.raises(JobError, match="EPHEMERON_DIRECT_TLS"):
        wanted_tls()


@pytest.mark.slow
def test_an_encrypted_run_has_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EPHEMERON_DIRECT_TRANSPORTS", "tcp")
    monkeypatch.setenv("EPHEMERON_DIRECT_TLS", "1")
    world = TrainingWorld(platform="local", job=JOB, memory_mb=704, folder=tmp_path)
    result, _ = world.go(channel="direct", faults=("kill:rank=1,iteration=5,phase=upload",), aggregators=0)
    world.check_same(result)
    assert result.summary.traffic.direct_bytes_sent > 0
