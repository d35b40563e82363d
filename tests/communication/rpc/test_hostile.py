"""Whatever comes in ends its own connection, in an orderly manner, and never the server."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faces import PATIENCE_S, TOKEN, Handlers, Loop, Served

from ephemeron.communication.rpc import BlockingServer, FrameLimits, Options, Server
from ephemeron.communication.rpc.auth import NONCE_BYTES, Offer, handshake
from ephemeron.communication.rpc.frame import FrameEntry, FrameMark, Head, Kind, pack
from ephemeron.errors import JobError

ROUNDS = 60


@pytest.fixture(params=["blocking", "asyncio"])
def served(request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Served]:
    """A server, of which nothing but closed connections is to be seen."""
    with ExitStack() as stack:
        loop = Loop()
        stack.callback(loop.close)
        options = Options(limits=FrameLimits(max_frame=1_000_000, max_buffers=16), max_calls=4)
        server = Served(request.param, loop, Handlers(), tmp_path / "s", options)
        stack.callback(server.close)
        yield server
        client = server.connect("blocking", "tcp")
        assert client.call("echo", {"still": "here"}, [bytes(500_000)])[0] == {"still": "here"}
        client.close()
    assert "Traceback" not in capfd.readouterr().err


def admitted(served: Served) -> socket.socket:
    """A socket whose owner knows the token."""
    sock = socket.create_connection(("127.0.0.1", served.port), PATIENCE_S)
    steps = handshake(TOKEN, client=True, offer=Offer(max_calls=1), nonce=bytes(NONCE_BYTES))
    try:
        step = next(steps)
        while True:
            if isinstance(step, bytes):
                sock.sendall(step)
                step = steps.send(b"")
            else:
                step = steps.send(sock.recv(step, socket.MSG_WAITALL))
    except StopIteration:
        return sock


def is_closed(sock: socket.socket) -> bool:
    """Whether the server ends the connection. It may have answered before."""
    try:
        while sock.recv(1 << 20):
            pass
    except ConnectionError:
        pass
    return True


def shout(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def frame(kind: int = Kind.REQUEST, id: int = 1, tag: bytes = b'{"m":"echo"}', data: bytes = b"", **head: int) -> bytes:
    entries = [FrameEntry(len(data), len(data), FrameMark.BYTES, 0)] if data else []
    fields = {"flags": 0, "segment": 0, "id": id, "tag_bytes": len(tag), "buffers": len(entries), "data": len(data), "rate": 0}
    return pack(Head(kind=kind, **{**fields, **head}), entries, tag) + data  # type: ignore[arg-type]


def test_strangers_are_shown_out(served: Served) -> None:
    rng = random.Random(1)
    for _ in range(ROUNDS):
        with socket.create_connection(("127.0.0.1", served.port), PATIENCE_S) as sock:
            shout(sock, rng.randbytes(rng.choice((0, 1, 47, 48, 80, 500, 100_000))))
            assert is_closed(sock)


def test_friends_who_talk_rubbish_too(served: Served) -> None:
    rng = random.Random(2)
    for _ in range(ROUNDS):
        with admitted(served) as sock:
            shout(sock, rng.randbytes(rng.choice((1, 36, 37, 500, 100_000))))
            assert is_closed(sock)


def test_good_frames_with_bad_bytes(served: Served) -> None:
    rng = random.Random(3)
    good = frame(tag=b'{"m":"echo","p":{"a":1}}', data=b"x" * 3_000) + frame(id=2) + frame(Kind.CANCEL, 3)
    for _ in range(ROUNDS):
        with admitted(served) as sock:
            bad = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            shout(sock, bytes(bad[: rng.choice((len(bad), rng.randrange(len(bad))))]))
            assert is_closed(sock)


@pytest.mark.parametrize(
    "make",
    [
        lambda: frame(data=bytes(8), buffers=2**32 - 1),
        lambda: frame(data=bytes(8))[:28] + (2**63).to_bytes(8, "big"),
        lambda: frame(tag_bytes=2**32 - 1),
        lambda: frame(data=bytes(1_000_001)),
        lambda: frame(buffers=17),
        lambda: frame(segment=3, data=bytes(8)),
        lambda: frame(flags=1),
        lambda: frame(flags=2),
        lambda: frame(tag=b"{"),
        lambda: frame(tag=b'{"m":null}'),
        lambda: frame(tag=b'{"m":"echo","p":7}'),
        lambda: frame(tag=b"[" * 50_000),
        lambda: frame(tag=b"\xff\xfe"),
        lambda: frame(tag=b'{"m":"hang"}') * 2,
        lambda: b"".join(frame(id=n, tag=b'{"m":"hang"}') for n in range(1, 6)),
        lambda: frame(Kind.REPLY),
        lambda: frame(Kind.ERROR, tag=b'{"type":"KeyError","text":""}'),
    ],
)
def test_each_broken_rule_ends_the_connection(served: Served, make: Callable[[], bytes]) -> None:
    with admitted(served) as sock:
        try:
            sock.sendall(make())
        except ConnectionError:
            pass
        assert is_closed(sock)  # without our closing it


@pytest.mark.parametrize("deadline", ["-1", "1e300", '"x"', "NaN", "[]", "null", "true"])
def test_a_deadline_that_is_none_is_ignored(served: Served, deadline: str) -> None:
    with admitted(served) as sock:
        sock.sendall(frame(tag=b'{"m":"echo","t":%s}' % deadline.encode()))
        assert sock.recv(4, socket.MSG_WAITALL) == b"EPH2"


def test_a_pickle_is_not_read_where_no_objects_are_taken(tmp_path: Path) -> None:
    hole = tmp_path / "hole"
    bomb = b"cbuiltins\nopen\n(S'%s'\nS'w'\ntR." % str(hole).encode()
    loop = Loop()

    def plain(method: str, params: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        return params, buffers

    async def later(*args: Any) -> tuple[dict[str, Any], list[Any]]:
        return plain(*args)

    blocking, other = BlockingServer(plain, token=TOKEN), Server(later, token=TOKEN)
    ports = [blocking.listen_tcp()[1], loop.run(other.listen_tcp())[1]]
    for port in ports:
        served = Served.__new__(Served)
        served.port = port
        with admitted(served) as sock:
            sock.sendall(frame(data=bomb, flags=1))
            head = sock.recv(36, socket.MSG_WAITALL)
            assert head[4] == Kind.ERROR
            assert b"takes no objects" in sock.recv(1000)
    blocking.close()
    loop.run(other.close())
    loop.close()
    assert not hole.exists()


def test_nothing_listens_beyond_loopback_unless_told_to() -> None:
    server = BlockingServer(lambda *_: ({}, ()), token=TOKEN)
    with pytest.raises(JobError, match=r"'0\.0\.0\.0' can be reached from other machines.*allow_remote=True"):
        server.listen_tcp("0.0.0.0")
    assert server.listen_tcp()[0] == "127.0.0.1"
    server.listen_tcp("0.0.0.0", allow_remote=True)
    server.close()
    with pytest.raises(ValueError, match="token"):
        BlockingServer(lambda *_: ({}, ()), token="")


@pytest.mark.parametrize("wrong", [{"max_calls": 0}, {"limits": FrameLimits(max_tag=10)}])
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="is too small; give at least"):
        Options(**wrong)
