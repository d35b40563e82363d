"""The part of HTTP/1.1 that a function's handler and the emulated clouds need: kept-alive connections, whole bodies, one
handler, and requests to others of its kind.

A server of the standard library would write header and body apart, and an answer would then wait for a delayed
acknowledgement: 40 ms for each warm call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from ephemeron.communication.unproved import UnprovedConnections, origin

_LINE = 1 << 16
_MOST_HEADERS = 200
REQUEST_S = 30.0
"""For a whole request to arrive, from the connection or from its first byte on."""
MAX_BODY = 256 << 20
"""Bytes of a request's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A complete request."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""
    query: str = ""
    """Text after `?`, undecoded."""

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; empty where there is none.

        Raises:
            ValueError: it is no JSON object.
        """
        try:
            value = json.loads(self.body) if self.body else {}
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
        if not isinstance(value, dict):
            raise ValueError("expected a JSON object")
        return value


class BodyTooLarge(ValueError):
    """A request has a body beyond the listener's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A complete answer."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    takes_over: TakesOver | None = None
    """Instead of an answer: gets the connection, which is closed afterwards; for other protocols, such as WebSocket."""


Handler: TypeAlias = Callable[[HttpRequest], Awaitable[Response]]
TakesOver: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with a JSON body."""
    return Response(status=status, headers={"Content-Type": "application/json", **(headers or {})}, body=json.dumps(value).encode())


class Listener:
    """A handler on a port. Made by `listen`.

    A connection without a complete request counts as unproved, and one that is kept alive does so again after each answer: it has no
    time limit, but is closed first where there are too many.
    """

    def __init__(self, handler: Handler, *, max_body: int, request_s: float) -> None:
        self.port = 0
        self.unproved = UnprovedConnections()
        self._max_body, self._request_s = max_body, request_s
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def open(self, host: str, port: int) -> None:
        """Begins to listen; port 0: a free one."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=_LINE)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Ends listening and every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        sock = writer.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            kept = False
            while (request := await self._next(reader, writer, kept=kept)) is not None:
                kept = True
                response = await self._handler(request)
                if response.takes_over is not None:
                    await response.takes_over(reader, writer)
                    break
                writer.write(_encode(response))
                await writer.drain()
                if request.headers.get("connection", "").lower() == "close":
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            pass  # the client is gone, sent no HTTP, or the listener closes: no answer is possible
        finally:
            self._connections.discard(task)
            writer.close()

    async def _next(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, kept: bool) -> HttpRequest | None:
        """The next request; None: there is none, or it does not arrive in time. `kept`: there was one before."""
        sock = writer.get_extra_info("socket")
        settle = self.unproved.admit(origin(sock) if sock is not None else "", writer.transport.abort)
        try:
            first = await reader.read(1) if kept else b""  # of the next request, whenever it comes
            if kept and not first:
                return None
            async with asyncio.timeout(self._request_s):
                return await _read(reader, writer, first=first, max_body=self._max_body)
        except BodyTooLarge as e:
            writer.write(_encode(Response(status=413, headers={"Connection": "close"}, body=str(e).encode())))
            writer.write_eof()
            with contextlib.suppress(TimeoutError):  # closed with bytes unread, the connection would end before the answer is read
                async with asyncio.timeout(self._request_s):
                    while await reader.read(_LINE):
                        pass
            return None
        except TimeoutError:
            return None
        finally:
            settle()


async def listen(
    handler: Handler, *, host: str = "127.0.0.1", port: int = 0, max_body: int = MAX_BODY, request_s: float = REQUEST_S
) -> Listener:
    """Serves a handler on a port; 0: a free one.

    Args:
        handler: answers requests.
        host, port: where to listen.
        max_body: bytes of a request's body; larger ones are answered with 413.
        request_s: for a whole request to arrive.
    """
    listener = Listener(handler, max_body=max_body, request_s=request_s)
    await listener.open(host, port)
    return listener


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, first: bytes, max_body: int) -> HttpRequest | None:
    line = first + await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers = await _headers(reader)
    nbytes = int(headers.get("content-length", 0))
    _check(nbytes, max_body)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _chunks(reader, max_body=max_body)
    else:
        body = await reader.readexactly(nbytes)
    parts = urlsplit(target)
    return HttpRequest(method=method, path=unquote(parts.path), headers=headers, body=body, query=parts.query)


def _check(nbytes: int, max_body: int | None) -> None:
    if max_body is not None and nbytes > max_body:
        raise BodyTooLarge(f"a body of {nbytes} bytes or more; at most {max_body} are taken")


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    nbytes = 0
    while line := (await reader.readline()).strip():
        nbytes += len(line)
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > _MOST_HEADERS or nbytes > _LINE:
            raise ValueError("too many headers")
    return headers


async def _chunks(reader: asyncio.StreamReader, *, max_body: int | None = None) -> bytes:
    out = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        _check(len(out) + size, max_body)
        out += await reader.readexactly(size)
        await reader.readline()
    while (await reader.readline()).strip():
        pass  # trailers
    return bytes(out)


def _encode(response: Response) -> bytes:
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {response.status} {phrase}", f"Content-Length: {len(response.body)}"]
    lines += [f"{name}: {value}" for name, value in response.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + response.body


async def ask(host: str, port: int, method: str, target: str, *, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Response:
    """One request over a connection of its own, which is closed when the caller is cancelled.

    Returns:
        The answer, with names of headers in lower case.

    Raises:
        OSError: no listener, or the connection is lost.
        asyncio.IncompleteReadError, ValueError: what came is no answer of HTTP.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE)
    try:
        told = {"Host": f"{host}:{port}", **(headers or {}), "Content-Length": str(len(body)), "Connection": "close"}
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in told.items()), "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + body)
        await writer.drain()
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("the connection ended without an answer")
        status = int(line.split(b" ", 2)[1])
        found = await _headers(reader)
        if found.get("transfer-encoding", "").lower() == "chunked":
            data = await _chunks(reader)
        elif "content-length" in found:
            data = await reader.readexactly(int(found["content-length"]))
        else:
            data = await reader.read()
        return Response(status=status, headers=found, body=data)
    finally:
        writer.close()
