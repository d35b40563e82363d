"""Signatures of objects whose content is executed or decoded: code, specifications, weights, checkpoints, functions and results.

Every run has a key of its own, made by the client. It is in the run's folder (mode 600) and in the calls, and in no store,
event or log. So a principal that can only write to the store cannot make an object that functions accept. HMAC-SHA256 covers
the object's name and its bytes: an object of another run, or of another name of the run, is refused. A signature does not
tell an older object of the same name from the newest one. It takes about 1 ms per MB, so what is exchanged in every iteration
is not signed.

    magic 8s, 24 unused, HMAC-SHA256 32s; then the object itself
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ephemeron.communication.channels.base import Buffer
from ephemeron.errors import SignatureRefused

MAGIC = b"EPHMSIG1"
_DIGEST_BYTES = hashlib.sha256().digest_size
SIGNATURE_BYTES = 64
"""Bytes before the object: a multiple of every alignment that its arrays may need."""
_HEAD = MAGIC.ljust(SIGNATURE_BYTES - _DIGEST_BYTES, b"\0")
_KEY_BYTES = 32
_DERIVES = b"\xff" * 8
"""Begins what keys are derived from; what is signed begins with the length of a name, which is never that large."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """Key of one run. Its text form is for `Call.key` and the run's folder only."""

    secret: bytes = field(repr=False)
    """Empty in calls without a key, whose functions execute nothing from the store."""

    @classmethod
    def new(cls) -> SigningKey:
        """A random key."""
        return cls(secrets.token_bytes(_KEY_BYTES))

    @classmethod
    def from_text(cls, text: str) -> SigningKey:
        """The inverse of `text`.

        Raises:
            SignatureRefused: it is not hexadecimal.
        """
        try:
            return cls(bytes.fromhex(text))
        except ValueError:
            raise SignatureRefused("the key of the call or of the run's folder is not hexadecimal") from None

    @property
    def text(self) -> str:
        """The key in hexadecimal digits."""
        return self.secret.hex()

    def derived(self, name: str) -> SigningKey:
        """The key of a part of the run, such as a trial. Who has it cannot compute this one, or that of another part."""
        return SigningKey(hmac.new(self.secret, _DERIVES + name.encode(), hashlib.sha256).digest())

    def signed(self, buffers: Sequence[Buffer], *, name: str) -> list[Buffer]:
        """The object as it is to be stored under `name`. Nothing is copied."""
        return [_HEAD + self._digest(buffers, name), *buffers]

    def verified(self, data: memoryview | bytes, *, name: str) -> memoryview:
        """The inverse of `signed`: a view of the object.

        Raises:
            SignatureRefused: it has no signature, or one of another key, of another name or of other bytes.
        """
        view = memoryview(data)
        if len(view) < SIGNATURE_BYTES or view[: len(_HEAD)] != _HEAD:
            raise SignatureRefused("the object is not signed: something else than this run has stored it", key=name)
        body = view[SIGNATURE_BYTES:]
        if not hmac.compare_digest(self._digest([body], name), bytes(view[len(_HEAD) : SIGNATURE_BYTES])):
            raise SignatureRefused(
                "the signature does not match: the object was changed, or is another run's or another object's", key=name
            )
        return body

    def _digest(self, buffers: Sequence[Buffer], name: str) -> bytes:
        encoded = name.encode()
        mac = hmac.new(self.secret, len(encoded).to_bytes(8, "little") + encoded, hashlib.sha256)
        for part in buffers:
            mac.update(part)
        return mac.digest()


def create_key(path: Path, key: SigningKey | None = None) -> SigningKey:
    """Writes a key into a new file that only its owner can read.

    Args:
        path: of the file.
        key: None: a new one.

    Raises:
        FileExistsError: there is one already.
    """
    key = key or SigningKey.new()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as out:
        out.write(key.text + "\n")
    return key


def read_key(path: Path) -> SigningKey:
    """The key in a file.

    Raises:
        FileNotFoundError: there is none.
        SignatureRefused: the file holds something else.
    """
    return SigningKey.from_text(path.read_text().strip())
