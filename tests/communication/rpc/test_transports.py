"""What holds over every transport and between both faces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faces import PATIENCE_S, in_thread, pair

from ephemeron.communication.rpc import Options, Receive
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, RemoteError, TokenRefused

FACES = ("blocking", "asyncio")
TRANSPORTS = ("tcp", "unix", "shared")
Pair = Callable[..., AbstractContextManager[tuple[Any, Any]]]


@pytest.fixture(params=list(product(FACES, FACES, TRANSPORTS)), ids="-".join)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """`pair`, for every client, server and transport."""
    return partial(pair, tmp_path, *request.param)


@pytest.fixture(params=list(product(FACES, FACES)), ids="-".join)
def connect_unix(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    """`pair`, for every client and server."""
    return partial(pair, tmp_path, *request.param, "unix")


def test_parameters_and_buffers_come_back_as_views(connect: Pair, request: pytest.FixtureRequest) -> None:
    with connect() as (client, served):
        assert client.transport == request.node.callspec.id.rpartition("-")[2]
        sent = [b"", b"one", bytearray(b"two" * 30_000), np.arange(1000, dtype="f4").data, b"", bytes(1_000_000)]
        for _ in range(3):
            reply, buffers = client.call("echo", {"a": [1, None, "ü"]}, sent)
            assert reply == {"a": [1, None, "ü"]}
            assert [type(buffer) for buffer in buffers] == served.handlers.types == [memoryview] * 6
            assert [bytes(buffer) for buffer in buffers] == [bytes(buffer) for buffer in sent]
        assert client.call("echo") == ({}, [])


def test_copies_are_real_bytes(connect: Pair) -> None:
    sent = [b"", b"one", bytes(range(256)) * 400, bytes(65), b"x" * 700_000]
    with connect(options=Options(receive=Receive.COPIES)) as (client, served):
        _, buffers = client.call("echo", {}, sent, receive=Receive.COPIES)
        assert [type(buffer) for buffer in buffers] == served.handlers.types == [bytes] * 5
        assert buffers == sent
        many = [bytes([n % 256]) * n for n in range(1_000)]
        assert client.call("echo", {}, many, receive=Receive.COPIES)[1] == many


def test_objects_come_back_equal_and_of_the_types_asked_for(connect: Pair) -> None:
    value = {"a": [b"x" * 500_000, b"small"], "b": np.arange(200_000.0).reshape(400, 500), "c": bytearray(9_000)}
    with connect() as (client, _):
        copied = client.call_object("echo", value)
        assert [type(part) for part in copied["a"]] == [bytes, bytes]
        assert copied["a"] == value["a"]
        assert type(copied["c"]) is bytearray
        assert np.array_equal(copied["b"], value["b"])
        copied["b"][0, 0] = 5.0  # writable, and its own
        seen = client.call_object("echo", value, receive=Receive.VIEWS)
        assert [type(part) for part in seen["a"]] == [memoryview, bytes]
        assert seen["a"] == value["a"]
        assert seen["a"][0].readonly
        assert np.array_equal(seen["b"], value["b"])
        assert client.call_object("type", 3) == "int"
        with pytest.raises(RemoteError, match="no such object"):
            client.call_object("fail", None)


def test_a_kept_view_is_never_written_over(connect: Pair) -> None:
    with connect() as (client, served):
        kept = []
        for n in range(12):
            size = 150_000 + 10_000 * (n % 3)
            _, (view,) = client.call("make", {"sizes": [size + n]})
            kept.append((view[n:], bytes([(size + n) % 256])))
            array = client.call_object("echo", np.full(40_000, n), receive=Receive.VIEWS)
            kept.append((array[1:], np.int64(n).tobytes()))
            client.call("keep", {}, [bytes([n]) * 200_000])
        for _ in range(20):
            client.call("echo", {}, [b"\xff" * 180_000])
        for view, unit in kept:
            assert bytes(view) == unit * (memoryview(view).nbytes // len(unit))
        assert [bytes(buffer) for buffer in served.handlers.kept] == [bytes([n]) * 200_000 for n in range(12)]


def test_calls_overtake_each_other(connect: Pair) -> None:
    with connect() as (client, served):
        slow = [in_thread(partial(client.call, "wait", {"n": n}, [bytes([n]) * 50_000])) for n in range(8)]
        for _ in slow:
            assert served.handlers.entered.acquire(timeout=PATIENCE_S)
        assert client.call("echo", {"n": -1}) == ({"n": -1}, [])
        served.handlers.release.set()
        for n, result in enumerate(slow):
            reply, (buffer,) = result()
            assert reply == {"n": n}
            assert buffer == bytes([n]) * 50_000


def test_large_and_small_calls_of_many_threads_are_interleaved(connect: Pair) -> None:
    with connect() as (client, _):

        def some(i: int) -> None:
            for n in range(6):
                data = bytes([i]) * (i * 40_000)
                reply, (back,) = client.call("echo", {"i": i, "n": n}, [data])
                assert reply == {"i": i, "n": n}
                assert back == data

        for result in [in_thread(partial(some, i)) for i in range(8)]:
            result()


def test_what_a_handler_raises_arrives_by_name(connect: Pair) -> None:
    with connect() as (client, _):
        with pytest.raises(RemoteError, match="no such thing") as caught:
            client.call("fail")
        assert caught.value.type == "KeyError"
        with pytest.raises(RemoteError, match="TypeError"):
            client.call("no json")
        assert client.call("echo", {"still": "alive"})[0] == {"still": "alive"}


def test_a_deadline_ends_the_call_and_its_handler(connect: Pair) -> None:
    with connect() as (client, served):
        with pytest.raises(CallTimedOut, match="hang"):
            client.call("hang", timeout_s=0.05)
        assert served.handlers.cancelled.acquire(timeout=PATIENCE_S)
        assert client.call("echo", {"a": 1}, timeout_s=PATIENCE_S)[0] == {"a": 1}


def test_a_deadline_in_the_middle_of_sending_harms_nobody_else(connect_unix: Pair) -> None:
    with connect_unix() as (client, _):
        others = [in_thread(partial(client.call, "echo", {"n": n}, [bytes(300_000)])) for n in range(4)]
        for _ in range(3):
            with pytest.raises(CallTimedOut):
                client.call("echo", {}, [bytes(20_000_000)], timeout_s=0.001)
        assert [result()[0]["n"] for result in others] == list(range(4))
        assert client.call("echo", {"a": 1})[0] == {"a": 1}


def test_a_wrong_token_is_refused_at_once(connect: Pair, request: pytest.FixtureRequest) -> None:
    face, _, transport = request.node.callspec.id.split("-")
    with connect() as (client, served):
        with pytest.raises(TokenRefused):
            served.connect(face, transport, token="another")
        assert client.call("echo", {"a": 1})[0] == {"a": 1}


def test_a_server_that_leaves_fails_what_is_under_way(connect_unix: Pair) -> None:
    with connect_unix() as (client, served):
        pending = in_thread(lambda: client.call("hang"))
        assert served.handlers.entered.acquire(timeout=PATIENCE_S)
        served.close()
        with pytest.raises(ConnectionLost) as caught:
            pending()
        assert not caught.value.may_repeat
        with pytest.raises(ConnectionLost) as caught:
            client.call("echo")
        assert caught.value.may_repeat
        assert not client.connected
        assert served.handlers.cancelled.acquire(timeout=PATIENCE_S)


def test_a_client_that_leaves_has_its_handlers_cancelled(connect_unix: Pair) -> None:
    with connect_unix() as (client, served):
        pending = in_thread(lambda: client.call("hang"))
        assert served.handlers.entered.acquire(timeout=PATIENCE_S)
        client.close()
        with pytest.raises(ConnectionLost):
            pending()
        assert served.handlers.cancelled.acquire(timeout=PATIENCE_S)


def test_a_client_keeps_to_the_number_of_calls_that_a_server_answers(connect_unix: Pair) -> None:
    with connect_unix(options=Options(max_calls=3)) as (client, served):
        waiting = [in_thread(partial(client.call, "wait", {"n": n})) for n in range(9)]
        for _ in range(3):
            assert served.handlers.entered.acquire(timeout=PATIENCE_S)
        assert not served.handlers.entered.acquire(timeout=0.05)
        with pytest.raises(CallTimedOut):
            client.call("echo", timeout_s=0.05)
        served.handlers.release.set()
        assert [result()[0]["n"] for result in waiting] == list(range(9))
        assert client.call("echo", {"a": 1})[0] == {"a": 1}


def test_what_is_too_large_to_send_is_refused_here_and_the_connection_stays(connect_unix: Pair) -> None:
    with connect_unix() as (client, _):
        with pytest.raises(ProtocolError, match="max_buffers"):
            client.call("echo", {}, [b"x"] * 5_000)
        with pytest.raises(ProtocolError, match="max_tag"):
            client.call("echo", {"text": "x" * (1 << 20)})
        assert client.call("echo", {"a": 1})[0] == {"a": 1}
