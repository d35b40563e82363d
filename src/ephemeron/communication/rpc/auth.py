"""Mutual proof of a shared token, without I/O.

Each end sends a challenge; the client answers first, so that a stranger learns nothing from a server that could be tried
offline. An answer is an HMAC over role and both challenges: neither can be replayed or reflected to its sender.
Until both have checked it, no frame and no pickle is read. Then each end sends its `Offer`. The token is never sent;
later frames are neither encrypted nor signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import TypeAlias

from ephemeron.config.typed import Count, build
from ephemeron.errors import JobError, ProtocolError, TokenRefused

HELLO = b"ephemeron-rpc-3\n"
NONCE_BYTES = 32
_LENGTH = struct.Struct("!H")
Token: TypeAlias = str | bytes
"""A shared secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Capabilities of one end; sent once, after the proof."""

    max_calls: Count
    """Concurrent calls that it answers."""
    codecs: tuple[str, ...] = ()
    """Codecs that it can decompress."""
    shared: bool = False
    """Whether it can use data sections in shared memory."""


def token_text(token: Token) -> str:
    """A token as text: one that was read as bytes from a file means the same.

    Raises:
        JobError: it is neither, or empty.
    """
    try:
        text: object = token.decode() if isinstance(token, bytes | bytearray) else token
    except UnicodeDecodeError:
        text = None
    if not isinstance(text, str) or not text:
        kind = "empty" if text == "" else f"{type(token).__name__} and no text"
        raise JobError(f"the token is {kind}", remedy="give the text that the service was started with")
    return text


def handshake(token: Token, *, client: bool, offer: Offer, nonce: bytes) -> Generator[bytes | int, bytes, Offer]:
    """The first words on a connection: yields bytes to send, or how many to receive, and is sent those.

    Returns:
        Offer of the other end.

    Raises:
        JobError: the token is none; at once.
        TokenRefused: the other end has another token.
        ProtocolError: the other end has another protocol.
    """
    return _handshake(token_text(token).encode(), client=client, offer=offer, nonce=nonce)


def _handshake(token: bytes, *, client: bool, offer: Offer, nonce: bytes) -> Generator[bytes | int, bytes, Offer]:
    yield HELLO + nonce
    hello = yield len(HELLO) + NONCE_BYTES
    if not hello.startswith(HELLO):
        raise ProtocolError(f"the other end does not speak this protocol: it begins with {hello[:16]!r}")
    theirs = hello[len(HELLO) :]
    nonces = nonce + theirs if client else theirs + nonce
    proofs = {role: hmac.digest(token, role + nonces, hashlib.sha256) for role in (b"client", b"server")}
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
        return build(Offer, json.loads(text), where="offer of the other end")
    except (ValueError, RecursionError) as e:
        raise ProtocolError("the other end's offer is damaged") from e
    except JobError as e:
        raise ProtocolError(str(e)) from None
