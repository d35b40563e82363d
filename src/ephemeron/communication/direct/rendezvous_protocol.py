"""Messages between a member and the rendezvous service: a length in two bytes, then one JSON object with the message's name.

Every connection begins with the mutual proof of the service's token (`rpc/auth`). Its first message says what it is for:

    control   Register ─▶ ◀─ Registered          kept open; Ping ─▶ ◀─ Pong
              Invite ─▶                           one member wants a connection to another one:
              ◀─ Invited | Refused  Invited ─▶    a ticket for each of the two
    ticket    Redeem ─▶  ◀─ Go                    a connection from the port that will be punched from, or that is relayed

Members of different runs do not see each other: a run's group is an HMAC of the run's token, which the service never learns.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import struct
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from ephemeron.communication.direct.transport import prove
from ephemeron.config.typed import AtLeast, Form, Within, build
from ephemeron.errors import JobError, ProtocolError

Purpose: TypeAlias = Literal["punched", "relay"]
"""Name of the transport that a meeting is for."""
MAX_MESSAGE_BYTES = 1024
"""Bytes of one message."""
_Name = Annotated[str, Form(r"[A-Za-z0-9._-]{1,64}", "1 to 64 letters, digits, dots, dashes")]
_Secret = Annotated[str, Form(r"[0-9a-f]{32,64}", "32 to 64 hexadecimal digits")]
_LENGTH = struct.Struct("!H")


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A member announces itself; an earlier registration of the same name ends."""

    group: _Secret
    """Of the run: see `group_of`."""
    name: _Name
    """Of the member, within its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The member is registered."""

    host: str
    """Address from which the member's connection comes, as the service sees it."""
    port: Annotated[int, Within(0, 65535)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invite:
    """A member wants a connection to another one."""

    number: Annotated[int, AtLeast(1)]
    """Repeated in the answer."""
    name: _Name
    """Of the other member."""
    purpose: Purpose
    timeout_s: Annotated[float, Within(0, 60)]
    """Seconds that both members try for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invited:
    """A ticket for a meeting of two members."""

    number: int
    """Of the `Invite`; 0: the other member wants it."""
    name: _Name
    """Of the other member."""
    purpose: Purpose
    timeout_s: float
    """See `Invite`."""
    ticket: _Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An `Invite` has no effect."""

    number: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Redeem:
    """First message on a connection for a meeting."""

    ticket: _Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Both members have redeemed their tickets. "relay": what follows is the other member's."""

    host: str
    """Address of the other member's connection, as the service sees it."""
    port: Annotated[int, Within(0, 65535)]
    wait_s: Annotated[float, Within(0, 10)]
    """Seconds until both members connect; longer for the member that is nearer to the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Keeps a control connection, and the translation of its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    """Answer to a `Ping`."""


Message: TypeAlias = Register | Registered | Invite | Invited | Refused | Redeem | Go | Ping | Pong
_MESSAGES: dict[str, type[Any]] = {cls.__name__: cls for cls in (Register, Registered, Invite, Invited, Refused, Redeem, Go, Ping, Pong)}


def group_of(run_token: str) -> str:
    """Name of a run at the service: known only to those who know the run's token, which it does not reveal."""
    return hmac.digest(run_token.encode(), b"rendezvous group", "sha256").hex()


class MessageSocket:
    """Messages over a connected, non-blocking socket. Never reads more than the messages, so that relayed bytes may follow.

    Args:
        sock: closed by `close`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sending = asyncio.Lock()

    async def prove(self, token: str, *, client: bool) -> float:
        """Both ends prove that they know the token.

        Returns:
            Seconds that it took: about one round trip.

        Raises:
            TokenRefused: the other end has another token.
            ProtocolError: the other end has another protocol.
            ConnectionError: it is gone.
        """
        began = time.monotonic()
        await prove(self.sock, token, client=client)
        return time.monotonic() - began

    async def send(self, message: Message) -> None:
        """Sends one message."""
        text = json.dumps({type(message).__name__: asdict(message)}).encode()
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self.sock, _LENGTH.pack(len(text)) + text)

    async def receive(self) -> Message:
        """Receives one message.

        Raises:
            ProtocolError: it is none, or too long.
            ConnectionError: the other end is gone.
        """
        (length,) = _LENGTH.unpack(await self._exactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length} bytes")
        return _decode(await self._exactly(length))

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()

    async def _exactly(self, nbytes: int) -> bytes:
        loop, out = asyncio.get_running_loop(), b""
        while len(out) < nbytes:
            part = await loop.sock_recv(self.sock, nbytes - len(out))
            if not part:
                raise ConnectionResetError("the other end closed the connection")
            out += part
        return out


def _decode(text: bytes) -> Message:
    try:
        value = json.loads(text)
        (name,) = value
        message: Message = build(_MESSAGES[name], value[name], where=name)
        return message
    except JobError as e:
        raise ProtocolError(str(e)) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ProtocolError(f"no message of the rendezvous service: it begins with {text[:32]!r}") from None
