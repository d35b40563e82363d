"""The handshake between two ends, one of which may lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.communication.channels.parameter_server import ParameterServerChannel
from ephemeron.communication.direct.rendezvous_service import RendezvousService
from ephemeron.communication.rpc import BlockingClient, BlockingServer, Server
from ephemeron.communication.rpc.auth import HELLO, NONCE_BYTES, Offer, handshake
from ephemeron.data.service import RemoteReader
from ephemeron.errors import JobError, ProtocolError, TokenRefused
from ephemeron.sparse.store.server import ShardServer
from ephemeron.sparse.store.state import ShardState

OFFER = Offer(max_calls=5, codecs=("zlib",), shared=True)
Steps = Generator[bytes | int, bytes, Offer]


def side(token: str, *, client: bool, nonce: bytes = b"", offer: Offer = OFFER) -> Steps:
    return handshake(token, client=client, offer=offer, nonce=nonce.ljust(NONCE_BYTES, b"c" if client else b"s"))


class End:
    """Runs a side as far as its input goes."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.out, self.result = steps, b"", None
        self.error: Exception | None = None
        self._said = b""
        self._resume(lambda: next(steps))

    def feed(self, data: bytes) -> None:
        self._said += data
        while isinstance(self._want, int) and len(self._said) >= self._want:
            chunk, self._said = self._said[: self._want], self._said[self._want :]
            self._resume(lambda chunk=chunk: self.steps.send(chunk))

    def hang_up(self) -> None:
        if isinstance(self._want, int):
            self._resume(lambda: self.steps.throw(ConnectionResetError("gone")))

    def take(self) -> bytes:
        out, self.out = self.out, b""
        return out

    def _resume(self, go: Callable[[], bytes | int]) -> None:
        self._want: Any = None
        try:
            step = go()
            while isinstance(step, bytes):
                self.out += step
                step = self.steps.send(b"")
            self._want = step
        except StopIteration as done:
            self.result = done.value
        except (TokenRefused, ProtocolError, ConnectionError) as e:
            self.error = e


def talk(client: End, server: End) -> None:
    for _ in range(10):
        server.feed(client.take())
        client.feed(server.take())
    if server.error:
        client.hang_up()
    if client.error:
        server.hang_up()


def test_both_learn_what_the_other_offers() -> None:
    other = Offer(max_calls=9)
    client, server = End(side("t", client=True)), End(side("t", client=False, offer=other))
    talk(client, server)
    assert (client.result, server.result) == (other, OFFER)


@given(st.text(min_size=1), st.text(min_size=1))
def test_only_the_same_token_will_do(mine: str, theirs: str) -> None:
    client, server = End(side(mine, client=True)), End(side(theirs, client=False))
    talk(client, server)
    if mine == theirs:
        assert client.result == server.result == OFFER
    else:
        assert isinstance(client.error, TokenRefused)
        assert isinstance(server.error, TokenRefused)


def test_the_token_is_never_sent_and_proofs_do_not_repeat() -> None:
    said = []
    for n in range(2):
        client, server = End(side("secret", client=True, nonce=bytes([n]))), End(side("secret", client=False))
        words = []
        for _ in range(4):
            words += [client.take(), server.take()]
            server.feed(words[-2])
            client.feed(words[-1])
        said.append(words)
    assert not any(b"secret" in word for words in said for word in words)
    assert said[0][2][:32] != said[1][2][:32]


def test_a_server_says_nothing_to_test_a_guess_with_before_the_client_has_proved() -> None:
    server = End(side("t", client=False))
    server.feed(HELLO + bytes(NONCE_BYTES))
    assert len(server.take()) == len(HELLO) + NONCE_BYTES
    server.feed(bytes(32))
    assert isinstance(server.error, TokenRefused)
    assert server.take() == b""


def test_a_reflected_proof_is_refused() -> None:
    client = End(side("t", client=True))
    client.feed(client.take()[: len(HELLO) + NONCE_BYTES])  # its own challenge
    client.feed(client.take()[-32:])  # and its own proof
    assert isinstance(client.error, TokenRefused)


@given(st.binary(min_size=48, max_size=200))
def test_rubbish_is_refused_by_both(rubbish: bytes) -> None:
    for client in (True, False):
        end = End(side("t", client=client))
        end.feed(rubbish)
        assert isinstance(end.error, ProtocolError | TokenRefused)


@pytest.mark.parametrize(
    "offer",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 5_000,
        b'{"max_calls": 0, "codecs": [], "shared": false}',
        b'{"max_calls": "x", "codecs": [], "shared": false}',
    ],
)
def test_a_damaged_offer_is_refused(offer: bytes) -> None:
    client, server = End(side("t", client=True)), End(side("t", client=False))
    server.feed(client.take())
    client.feed(server.take())
    proof = client.take()[:32]
    server.feed(proof + struct.pack("!H", len(offer)) + offer)
    assert isinstance(server.error, ProtocolError)
    assert json.loads(server.take()[34:])["max_calls"] == 5


@pytest.mark.parametrize("token", [b"\xff", None, 7, "", b""])
def test_a_token_that_is_none_is_refused_before_anything_is_sent(token: Any) -> None:
    with pytest.raises(JobError, match=r"the token is (bytes|NoneType|int|empty)"):
        handshake(token, client=True, offer=Offer(max_calls=1), nonce=bytes(NONCE_BYTES))


def test_the_bytes_of_a_token_are_the_token() -> None:
    with BlockingServer(lambda method, params, buffers: (params, []), token=b"a secret") as server:
        port = server.listen_tcp()[1]
        for token in ("a secret", b"a secret"):
            client = BlockingClient.connect_tcp("127.0.0.1", port, token=token)
            assert client.call("echo", {"x": 1})[0] == {"x": 1}
            client.close()
        for wrong in (b"a secret\n", "another"):
            with pytest.raises(TokenRefused):
                BlockingClient.connect_tcp("127.0.0.1", port, token=wrong)


async def _served(*_: Any) -> Any:
    return {}, []


@pytest.mark.parametrize(
    "make",
    [
        lambda token: Server(_served, token=token),
        lambda token: BlockingServer(lambda *_: ({}, []), token=token),
        lambda token: RendezvousService(token),
        lambda token: ShardServer(ShardState(), token=token),
        lambda token: RemoteReader("127.0.0.1:1", token=token),
        lambda token: ParameterServerChannel("ps://127.0.0.1:1", token=token),
    ],
    ids=["server", "blocking server", "rendezvous", "sparse store", "data service", "parameter server"],
)
def test_every_token_argument_takes_bytes_or_refuses(make: Callable[[Any], object]) -> None:
    make(b"the bytes of a token")
    for wrong in (b"\xff", 7):
        with pytest.raises(JobError, match="the token is"):
            make(wrong)
