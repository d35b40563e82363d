"""How two ends prove to each other that they know the same token, without I/O.

Each sends a challenge; the client answers first, so a stranger learns nothing from a server that could be tried
offline. An answer is an HMAC over role and both challenges: neither can be replayed, nor handed back to its sender.
Until both have checked it, no frame and no pickle is read. Then each says what it offers. The token is never sent;
what follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Generator
from dataclasses import asdict, dataclass

from ephemeron.errors import ProtocolError, TokenRefused

HELLO = b"ephemeron-rpc-2\n"
NONCE_BYTES = 32
_LENGTH = struct.Struct("!H")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one end can do; sent once, after the proof."""

    window: int
    """Bytes of messages that it takes on one stream before they are read there."""
    max_calls: int
    """Calls and streams that it answers at once."""
    codecs: tuple[str, ...] = ()
    """Codecs that it can undo."""
    shared: bool = False
    """Whether it wants data sections in shared memory."""


def handshake(token: str, *, client: bool, offer: Offer, nonce: bytes) -> Generator[bytes | int, bytes, Offer]:
    """The first words on a connection: yields bytes to send, or how many to receive, and is sent those.

    Returns:
        What the other end offers.

    Raises:
        TokenRefused: the other end has another token.
        ProtocolError: the other end speaks something else.
    """
    yield HELLO + nonce
    hello = yield len(HELLO) + NONCE_BYTES
    if not hello.startswith(HELLO):
        raise ProtocolError(f"the other end does not speak this protocol: it begins with {hello[:16]!r}")
    theirs = hello[len(HELLO) :]
    nonces = nonce + theirs if client else theirs + nonce
    proofs = {role: hmac.digest(token.encode(), role + nonces, hashlib.sha256) for role in (b"client", b"server")}
    if client:
        yield proofs[b"client"]
    try:
        given = yield hashlib.sha256().digest_size
    except ConnectionError as e:
        raise TokenRefused("the other end refused our token") from e
    if not hmac.compare_digest(given, proofs[b"server" if client else b"client"]):
        raise TokenRefused("the other end does not know our token")
    if not client:
        yield proofs[b"server"]
    text = json.dumps(asdict(offer)).encode()
    yield _LENGTH.pack(len(text)) + text
    (length,) = _LENGTH.unpack((yield _LENGTH.size))
    return _read((yield length))


def _read(text: bytes) -> Offer:
    try:
        said = json.loads(text)
        codecs = tuple(str(name) for name in said["codecs"])
        offer = Offer(
            window=int(said["window"]), max_calls=int(said["max_calls"]), codecs=codecs, shared=said["shared"] is True
        )
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ProtocolError("the other end's offer is damaged") from e
    if offer.window < 1 or offer.max_calls < 1:
        raise ProtocolError(f"the other end offers a window of {offer.window} and {offer.max_calls} calls")
    return offer
