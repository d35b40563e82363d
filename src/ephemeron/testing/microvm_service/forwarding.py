"""Connections through the endpoint of a MicroVM that leave HTTP, such as WebSocket: bytes pass in both directions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from ephemeron.communication.direct.tls_socket import until_first_ends
from ephemeron.communication.rpc.http import HttpRequest

_CHUNK = 1 << 18
_KEPT_BACK = ("x-aws-proxy-auth", "x-aws-proxy-port", "host")


async def forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, request: HttpRequest, path: str, more: Mapping[str, str], port: int
) -> None:
    """Sends a request on to a port of loopback, and then all bytes of both ends, until one of them closes.

    Args:
        reader, writer: of the client.
        request: as it came.
        path: at the MicroVM.
        more: headers that the endpoint adds.
        port: of the MicroVM's process.
    """
    try:
        there, onward = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        return
    headers = {name: value for name, value in request.headers.items() if name not in _KEPT_BACK} | dict(more)
    target = f"{path}?{request.query}" if request.query else path
    lines = [f"{request.method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    onward.write("\r\n".join(lines).encode("latin-1") + request.body)
    try:
        await until_first_ends(_pass(reader, onward), _pass(there, writer))
    finally:
        onward.close()
        with contextlib.suppress(OSError):
            await onward.wait_closed()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
