"""When to compress, and what a damaged or lying buffer does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from faces import pair
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.communication.rpc import Options
from ephemeron.communication.rpc.compression import Squeezer, codec, common, expand, offered, worth
from ephemeron.errors import ProtocolError

IDS = {"zlib": 1, "zstd": 2, "lz4": 3}
TEXT = b"the same words over and over again, " * 20_000


def ticking(step_s: float) -> Iterator[float]:
    return (n * step_s for n in count())


def squeezer(step_s: float = 1e-3) -> Squeezer:
    """With zlib, which takes a step of its clock for a probe of 64 KiB."""
    found = common(["zlib"], ["zlib"])
    assert found is not None
    return Squeezer(found, clock=ticking(step_s).__next__)


@pytest.fixture(params=IDS)
def name(request: pytest.FixtureRequest) -> str:
    if request.param not in offered():
        pytest.skip(f"{request.param} is not installed: pip install 'ephemeron[compress]'")
    return str(request.param)


def test_a_codec_undoes_what_it_did(name: str) -> None:
    for data in (b"x", TEXT, bytes(range(256)) * 50):
        small = codec(IDS[name]).compress(memoryview(data))
        assert expand(IDS[name], memoryview(small), len(data)) == data


@given(st.binary(max_size=200))
def test_rubbish_is_refused_by_every_codec(rubbish: bytes) -> None:
    for name in offered():
        with pytest.raises(ProtocolError):
            expand(IDS[name], memoryview(rubbish), 10_000)


def test_a_buffer_that_lies_about_its_size_is_refused_and_not_expanded(name: str) -> None:
    bomb = codec(IDS[name]).compress(memoryview(bytes(50_000_000)))
    for claimed in (1_000, 49_999_999, 50_000_001):
        with pytest.raises(ProtocolError):
            expand(IDS[name], memoryview(bomb), claimed)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ProtocolError, match="codec 77"):
        expand(77, memoryview(b"x"), 1)
    assert common(["zlib"], ["snappy"]) is None
    assert offered()[-1] == "zlib"


@given(st.floats(1e3, 1e11), st.floats(1e3, 1e11), st.floats(0, 1))
def test_compressing_is_worth_it_exactly_when_it_is_quicker(link: float, speed: float, ratio: float) -> None:
    plain, squeezed = 1 / link, 1 / speed + ratio / link
    if abs(plain - squeezed) > 1e-9 * plain:
        assert worth(link_bps=link, codec_bps=speed, ratio=ratio) == (squeezed < plain)


def test_only_a_measured_slow_link_is_worth_it() -> None:
    fast_codec = 65_536 / 1e-3  # bytes per second, as its clock says
    assert squeezer().squeeze(memoryview(TEXT), link_bps=None) is None
    assert squeezer().squeeze(memoryview(TEXT), link_bps=2 * fast_codec) is None
    small = squeezer().squeeze(memoryview(TEXT), link_bps=fast_codec / 10)
    assert small is not None
    assert expand(1, memoryview(small), len(TEXT)) == TEXT
    assert squeezer(step_s=10.0).squeeze(memoryview(TEXT), link_bps=fast_codec / 10) is None


def test_what_does_not_shrink_is_left_alone_for_a_while() -> None:
    import random

    noise, way = random.Random(1).randbytes(100_000), squeezer()
    assert way.squeeze(memoryview(noise), link_bps=1e3) is None
    tries = [way.squeeze(memoryview(TEXT), link_bps=1e3) is not None for _ in range(40)]
    assert tries == [False] * 32 + [True] * 8
    assert way.squeeze(memoryview(b"tiny"), link_bps=1e3) is None


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_slow_link_compresses_and_what_arrives_is_the_same(face: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The server's clock says that every data section takes a second: a slow link, of which its client is told.
    sent: list[int] = []
    real = socket.socket.sendmsg
    monkeypatch.setattr(socket.socket, "sendmsg", lambda sock, parts, *more: sent.append(sum(map(len, parts))) or real(sock, parts, *more))
    slow = Options(clock=ticking(1.0).__next__, compress=True)
    with pair(tmp_path, face, "blocking", "tcp", options=slow) as (client, served):
        for _ in range(3):
            sent.clear()
            _, (back,) = client.call("echo", {}, [TEXT])
            assert back == TEXT
            assert client.call_object("echo", TEXT) == TEXT
        assert sent[0] < len(TEXT) / 10
        assert served.handlers.types == [memoryview]
    fast = Options(clock=ticking(1e-9).__next__)
    for options, transport in ((Options(clock=slow.clock, compress=False), "tcp"), (slow, "unix"), (fast, "tcp")):
        with pair(tmp_path, face, "blocking", transport, options=options) as (client, _):
            for _ in range(2):
                sent.clear()
                client.call("echo", {}, [TEXT])
            assert max(sent) >= len(TEXT) / 10
