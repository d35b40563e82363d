"""A TCP proxy between functions and a store that resets, cuts short, delays, pauses and, over HTTP, answers 503.

    with FaultyProxy(store_port, http=True, decide=seeded(7, rate=0.1)) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"

Over HTTP a fault hits one request; else (Redis) one piece of what a client sends, which is a request unless that is large.
The proxy has a thread and an event loop of its own and listens on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Literal

from ephemeron.communication.direct.tls_socket import until_first_ends

Trouble = Literal["503", "429", "500", "reset", "lost-answer", "truncate", "delay"]
"""An answer of the proxy's own; reset before the store has heard of it, or after it has served it; half of the answer;
a short while later."""

HTTP_TROUBLES: tuple[Trouble, ...] = ("503", "429", "500", "reset", "lost-answer", "truncate", "delay")
TCP_TROUBLES: tuple[Trouble, ...] = ("reset", "lost-answer", "truncate", "delay")
DELAY_S = 0.3
_REASONS = {"503": "Service Unavailable", "429": "Too Many Requests", "500": "Internal Server Error"}
_CODES = {"503": "SlowDown", "429": "TooManyRequests", "500": "InternalError"}
_CHUNK = 1 << 16
_MOST_HEAD = 1 << 20


def seeded(seed: int | str, *, rate: float, troubles: tuple[Trouble, ...]) -> Callable[[], Trouble | None]:
    """A share of all requests fails, each in one of these ways."""
    rng = random.Random(seed)
    return lambda: rng.choice(troubles) if rng.random() < rate else None


def scripted(troubles: Iterable[Trouble | None]) -> Callable[[], Trouble | None]:
    """The first requests fail by a script."""
    left = iter(troubles)
    return lambda: next(left, None)


class FaultyProxy:
    """See the module.

    Args:
        port: of the store, on loopback.
        http: whether the store's protocol is HTTP.
        decide: asked for each request what happens to it.
    """

    def __init__(self, port: int, *, http: bool, decide: Callable[[], Trouble | None] = lambda: None) -> None:
        self.target, self.http, self.decide = port, http, decide
        self.port = 0
        self.injected: dict[str, int] = {}
        """Faults so far, by kind."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="faulty-proxy", daemon=True)
        self._ready = threading.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: set[asyncio.Task[None]] = set()

    def start(self) -> FaultyProxy:
        """Listens on a free port of loopback."""
        self._thread.start()
        self._ready.wait()
        return self

    def close(self) -> None:
        """Drops all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def __enter__(self) -> FaultyProxy:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def pause(self) -> None:
        """Nothing passes any more; connections stay."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def resume(self) -> None:
        """Ends a pause."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    # -- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, limit=_MOST_HEAD)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        upward: asyncio.StreamWriter | None = None
        try:
            there, upward = await asyncio.open_connection("127.0.0.1", self.target, limit=_MOST_HEAD)
            await (self._http if self.http else self._tcp)(reader, writer, there, upward)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            for side in (writer, upward):
                if side is not None:
                    with contextlib.suppress(OSError):
                        side.close()

    def _next(self) -> Trouble | None:
        trouble = self.decide()
        if trouble is not None:
            self.injected[trouble] = self.injected.get(trouble, 0) + 1
        return trouble

    async def _http(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, there: asyncio.StreamReader, upward: asyncio.StreamWriter
    ) -> None:
        while True:
            head, body = await _message(reader)
            await self._flowing.wait()
            trouble = self._next()
            if trouble in _REASONS:
                text = f"<Error><Code>{_CODES[trouble]}</Code><Message>injected</Message></Error>"
                writer.write(
                    f"HTTP/1.1 {trouble} {_REASONS[trouble]}\r\nContent-Type: application/xml\r\n"
                    f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
                )
                await writer.drain()
                continue
            if trouble == "reset":
                return _reset(writer)
            if trouble == "delay":
                await asyncio.sleep(DELAY_S)
            upward.write(head + body)
            await upward.drain()
            bodiless = head.startswith(b"HEAD ")
            answer_head, answer = await _message(there, bodiless=bodiless)
            await self._flowing.wait()
            if trouble == "lost-answer":
                return _reset(writer)
            whole = answer_head + answer
            writer.write(whole[: len(answer_head) + len(answer) // 2] if trouble == "truncate" else whole)
            await writer.drain()
            if trouble == "truncate":
                return

    async def _tcp(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, there: asyncio.StreamReader, upward: asyncio.StreamWriter
    ) -> None:
        after: list[Trouble] = []

        async def up() -> None:
            while data := await reader.read(_CHUNK):
                await self._flowing.wait()
                trouble = self._next()
                if trouble == "reset":
                    return _reset(writer)
                if trouble == "delay":
                    await asyncio.sleep(DELAY_S)
                elif trouble is not None:
                    after.append(trouble)
                upward.write(data)
                await upward.drain()

        async def down() -> None:
            while data := await there.read(_CHUNK):
                await self._flowing.wait()
                if after:
                    if after[0] == "truncate":
                        writer.write(data[: len(data) // 2])
                        await writer.drain()
                        return
                    return _reset(writer)
                writer.write(data)
                await writer.drain()

        await until_first_ends(up(), down())


async def _message(reader: asyncio.StreamReader, *, bodiless: bool = False) -> tuple[bytes, bytes]:
    """Head and body of one HTTP message."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    fields = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
    status = lines[0].split(" ")[1] if lines[0].startswith("http/") else ""
    if bodiless or status in ("204", "304"):
        return head, b""
    if "chunked" in fields.get("transfer-encoding", ""):
        parts = []
        while True:
            size = await reader.readuntil(b"\r\n")
            parts += [size, await reader.readexactly(int(size.split(b";")[0], 16) + 2)]
            if int(size.split(b";")[0], 16) == 0:
                return head, b"".join(parts)
    if "content-length" in fields:
        return head, await reader.readexactly(int(fields["content-length"]))
    return head, await reader.read() if status else b""


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
