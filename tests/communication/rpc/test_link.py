"""The blocking engine against a server that does exactly what its script says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from faces import PATIENCE_S, TOKEN, in_thread

from ephemeron.communication.rpc import BlockingClient
from ephemeron.communication.rpc import blocking_connection as module
from ephemeron.communication.rpc.auth import NONCE_BYTES, Offer, handshake
from ephemeron.communication.rpc.frame import ENTRY_BYTES, HEAD_BYTES, FrameEntry, FrameLimits, FrameMark, Head, Kind, pack, unpack_head
from ephemeron.errors import CallTimedOut, ConnectionLost


class Script:
    """The server's end of one connection, frame by frame."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        steps = handshake(TOKEN, client=False, offer=Offer(max_calls=9), nonce=bytes(NONCE_BYTES))
        try:
            step = next(steps)
            while True:
                if isinstance(step, bytes):
                    sock.sendall(step)
                    step = steps.send(b"")
                else:
                    step = steps.send(self.read(step))
        except StopIteration:
            pass

    def read(self, nbytes: int) -> bytes:
        return self.sock.recv(nbytes, socket.MSG_WAITALL) if nbytes else b""

    def receive(self) -> tuple[Kind, int, dict[str, Any]]:
        head = unpack_head(self.read(HEAD_BYTES), FrameLimits())
        self.read(ENTRY_BYTES * head.buffers)
        tag = json.loads(self.read(head.tag_bytes) or b"{}")
        self.read(head.data)
        return head.kind, head.id, tag


def reply(id: int, data: bytes, kind: Kind = Kind.REPLY) -> bytes:
    head = Head(kind, 0, 0, id, 2, 1, len(data), 0)
    return pack(head, [FrameEntry(len(data), len(data), FrameMark.BYTES, 0)], b"{}") + data


@pytest.fixture
def both() -> Iterator[tuple[BlockingClient, Script]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialing = in_thread(lambda: BlockingClient.connect_tcp(*listening.getsockname(), token=TOKEN))
        sock, _ = listening.accept()
        sock.settimeout(PATIENCE_S)
        with sock:
            script = Script(sock)
            client: BlockingClient = dialing()
            yield client, script
            client.close()


def test_a_reply_half_read_at_a_deadline_is_finished_by_the_next_caller(both: tuple[BlockingClient, Script]) -> None:
    client, script = both
    first = in_thread(lambda: client.call("first", timeout_s=0.2))
    late = reply(script.receive()[1], b"x" * 10_000)
    script.sock.sendall(late[:5_000])
    with pytest.raises(CallTimedOut):
        first()
    assert script.receive()[0] is Kind.CANCEL
    second = in_thread(lambda: client.call("second"))
    script.sock.sendall(late[5_000:] + reply(script.receive()[1], b"y" * 10_000))
    assert second()[1] == [b"y" * 10_000]


def test_a_reply_that_trickles_in_does_not_put_the_deadline_off(both: tuple[BlockingClient, Script]) -> None:
    client, script = both
    call = in_thread(lambda: client.call("slow", timeout_s=0.3))
    trickle, stop = reply(script.receive()[1], b"x" * 100_000), threading.Event()

    def drip() -> None:
        for byte in trickle:
            if stop.wait(0.005):
                return
            script.sock.sendall(bytes([byte]))

    dripping = in_thread(drip)
    with pytest.raises(CallTimedOut):  # long before all of it is there
        call()
    stop.set()
    dripping()


def test_who_waits_reads_for_all_and_the_next_one_takes_over(both: tuple[BlockingClient, Script]) -> None:
    client, script = both
    calls = {}
    for n in range(5):
        result = in_thread(lambda n=n: client.call("any", {"n": n}))
        _, id, tag = script.receive()
        calls[tag["p"]["n"]] = (id, result)
    for n in (3, 0, 4, 1, 2):
        id, result = calls[n]
        script.sock.sendall(reply(id, bytes([n])))
        assert result()[1] == [bytes([n])]


def test_a_request_that_is_not_taken_breaks_the_connection_in_the_end(
    both: tuple[BlockingClient, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = both
    monkeypatch.setattr(module, "_FLUSH_S", 0.1)
    with pytest.raises(CallTimedOut):
        client.call("large", {}, [bytes(50_000_000)], timeout_s=0.1)
    assert not client.connected
    with pytest.raises(ConnectionLost, match="unfinished"):
        client.call("small")
