"""TLS for code that works on plain sockets: one end of a pair of sockets, and tasks that encrypt what passes.

The price is one more copy, within this process. Certificates are always verified (`channels/tls`).

TLS 1.3 between functions, under certificates that each function makes for itself.

No authority signs such a certificate. It is pinned by the proof of the run's token: over TLS both ends prove a token that is derived from
the run's and from the certificate of the end that was dialled, as each of them sees it. Who sits in between with a certificate of
another key knows no such token.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import socket
import ssl
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ephemeron.communication.channels.credentials import variable
from ephemeron.communication.channels.tls import authority
from ephemeron.communication.rpc.frame_socket import carry
from ephemeron.errors import JobError, MissingExtra

_CHUNK = 1 << 18
_passing: set[asyncio.Task[None]] = set()


def client_context() -> ssl.SSLContext:
    """The system's authorities, and that of EPHEMERON_CHANNEL_CA; TLS 1.2 or later.

    Raises:
        JobError: EPHEMERON_CHANNEL_CA holds no certificate.
    """
    context = ssl.create_default_context()
    if (extra := authority()) is not None:
        context.load_verify_locations(cadata=extra)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """A server's certificate chain and its key, from PEM files.

    Raises:
        JobError: they cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as e:
        raise JobError(f"{certificate} and {key} are no certificate with its key: {e}", remedy="give two files in PEM format") from None
    return context


async def over_tls(sock: socket.socket, context: ssl.SSLContext, *, server_hostname: str | None = None, limit_s: float) -> socket.socket:
    """A plain socket whose bytes travel over `sock` encrypted; closing it closes `sock`, too.

    Args:
        sock: connected and non-blocking; closed here if the handshake fails.
        context: of a client or of a server.
        server_hostname: whom a client's certificate check expects; None: this is the server.
        limit_s: for the handshake.

    Raises:
        OSError: the handshake fails: `ssl.SSLError` says why.
        TimeoutError: it takes too long.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    try:
        async with asyncio.timeout(limit_s):
            if server_hostname is None:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
            else:
                transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=context, server_hostname=server_hostname)
    except BaseException:
        sock.close()
        raise
    return pass_through(reader, asyncio.StreamWriter(transport, protocol, reader, loop))[0]


async def until_first_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Runs both directions of a connection at once, and cancels the other when one has ended; errors of either are dropped."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def pass_through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[socket.socket, asyncio.Task[None]]:
    """A plain, non-blocking socket whose bytes go through a stream, each end's close closes the other; and the task that does it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    carry(theirs, writer.get_extra_info("socket"))
    task = asyncio.get_running_loop().create_task(_pass(ours, reader, writer))
    _passing.add(task)
    task.add_done_callback(_passing.discard)
    return theirs, task


async def _pass(sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()

    async def outward() -> None:
        while data := await loop.sock_recv(sock, _CHUNK):
            writer.write(data)
            await writer.drain()

    async def inward() -> None:
        while data := await reader.read(_CHUNK):
            await loop.sock_sendall(sock, data)

    try:
        await until_first_ends(outward(), inward())
    finally:
        sock.close()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


# -- TLS 1.3 between functions ------------------------------------------------------------------------------------


TLS_VARIABLE = "EPHEMERON_DIRECT_TLS"
"""1: connections of functions over `tcp`, `punched` and `relay` are encrypted from end to end."""
_FLUSH_S = 2.0


class PinnedTls:
    """Certificate of one function, and its encrypted connections.

    Raises:
        MissingExtra: nothing can make certificates.
    """

    def __init__(self) -> None:
        self._fingerprint, self._server = _certified()
        self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._client.minimum_version = ssl.TLSVersion.TLSv1_3
        self._client.check_hostname, self._client.verify_mode = False, ssl.CERT_NONE  # see the module
        self._passing: set[asyncio.Task[None]] = set()

    async def secure(self, sock: socket.socket, token: str, *, dialled: bool) -> tuple[socket.socket, str]:
        """Encrypts what is sent over a socket from now on. Callers limit the time.

        Args:
            sock: connected and non-blocking; owned from now on.
            token: of the run.
            dialled: whether this end has opened the connection.

        Returns:
            A plain socket whose bytes travel over `sock` encrypted, and the token that both ends must prove over it.

        Raises:
            OSError: the handshake fails.
        """
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        sock = socket.socket(fileno=sock.detach())  # no other owner may close it under the event loop
        try:
            if dialled:
                transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=self._client, server_hostname="")
                certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
                fingerprint = hashlib.sha256(certificate).digest()
            else:
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._server)
                fingerprint = self._fingerprint
        except BaseException:
            sock.close()
            raise
        plain, passing = pass_through(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)
        return plain, hmac.digest(token.encode(), b"direct tls/" + fingerprint, hashlib.sha256).hex()

    async def close(self) -> None:
        """Waits until what was sent over closed connections has left this process."""
        if self._passing:
            await asyncio.wait(self._passing, timeout=_FLUSH_S)


def wanted_tls() -> PinnedTls | None:
    """TLS of this function, where `EPHEMERON_DIRECT_TLS` asks for it.

    Raises:
        JobError: the variable is neither 0 nor 1.
        MissingExtra: nothing can make certificates.
    """
    value = (variable(TLS_VARIABLE) or "0").strip()
    if value not in ("", "0", "1"):
        raise JobError(f"{TLS_VARIABLE} is {value!r}", remedy="give 1 for encrypted connections, 0 for plain ones")
    return PinnedTls() if value == "1" else None


def _certified() -> tuple[bytes, ssl.SSLContext]:
    """Fingerprint of a new certificate, and the context of an end that has it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise MissingExtra("cryptography", "tls") from None
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ephemeron")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    pem = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory() as folder:  # `ssl` reads files only; the folder is this user's alone
        file = Path(folder) / "pem"
        file.touch(mode=0o600)
        file.write_bytes(pem + certificate.public_bytes(encoding))
        context.load_cert_chain(file)
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest(), context
