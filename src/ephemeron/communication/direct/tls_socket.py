"""TLS for code that works on plain sockets: one end of a pair of sockets, and tasks that encrypt what passes.

The price is one more copy, within this process. Certificates are always verified (`channels/tls`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

from ephemeron.communication.channels.tls import authority
from ephemeron.communication.rpc.kernel_counters import carry
from ephemeron.errors import JobError

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

    both = [loop.create_task(outward()), loop.create_task(inward())]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        sock.close()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
