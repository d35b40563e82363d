"""Checksums of bodies, whole and as they arrive."""

from __future__ import annotations

import asyncio
import random
import socket

import numpy as np
import pytest

from ephemeron.communication.direct.connection import CommonBody, SocketConnection
from ephemeron.communication.direct.message import HEAD_BYTES, Head, Kind

HEAD = Head(Kind.OBJECT, 0, 1, 7, 3, b"key")


class Received:
    """Handler that keeps what arrives."""

    def __init__(self):
        self.bodies, self.why = [], ""
        self.any = asyncio.Event()

    def allocate(self, connection, head, nbytes):
        return None

    def on_message(self, connection, head, body):
        self.bodies.append(bytes(body))
        self.any.set()

    def on_closed(self, connection, why):
        self.why = why
        self.any.set()


def sent_bytes(buffers):
    """What a connection writes for a message."""

    async def go():
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        connection = SocketConnection(ours, transport="tcp", dialled=True, checksums=True)
        connection.send(HEAD, buffers)
        length = HEAD_BYTES + len(HEAD.extra) + sum(memoryview(b).nbytes for b in buffers)
        found = bytearray()
        theirs.setblocking(False)
        while len(found) < length:
            found += await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
        connection.close()
        theirs.close()
        return found

    return asyncio.run(go())


def received(data, *, seed):
    """What a connection makes of bytes that arrive in parts of any length."""

    async def go():
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        handler = Received()
        connection = SocketConnection(ours, transport="tcp", dialled=False, checksums=True)
        connection.start(handler)
        at, lengths = 0, random.Random(seed)
        while at < len(data):
            part = data[at : at + lengths.choice([1, 100, 5_000, 100_000])]
            await asyncio.get_running_loop().sock_sendall(theirs, part)
            at += len(part)
            await asyncio.sleep(0)
        await handler.any.wait()
        connection.close()
        theirs.close()
        return handler

    return asyncio.run(go())


@pytest.mark.parametrize("nbytes", [1, 1_000, 40_000, 300_000, 1_000_000])
def test_a_body_arrives_or_its_damage_is_found(nbytes):
    body = np.random.default_rng(nbytes).bytes(nbytes)
    data = sent_bytes([body])
    for seed in range(3):
        assert received(data, seed=seed).bodies == [body]
        for place in {0, nbytes // 2, nbytes - 1}:
            damaged = bytearray(data)
            damaged[HEAD_BYTES + len(HEAD.extra) + place] ^= 1
            handler = received(damaged, seed=seed)
            assert handler.bodies == []
            assert handler.why == "a message has arrived damaged"


def test_the_checksum_of_a_body_for_several_is_that_of_its_buffers(monkeypatch):
    parts = [np.arange(50_000, dtype=np.float32).data, b"end"]
    assert sent_bytes(CommonBody(parts)) == sent_bytes(parts)
    made = []
    monkeypatch.setattr("ephemeron.communication.direct.connection._checksum", lambda views: made.append(1) or 5)
    body = CommonBody(parts)
    assert sent_bytes(body) == sent_bytes(body)
    assert made == [1]
