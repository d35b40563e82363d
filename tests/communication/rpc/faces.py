"""Both faces under one roof: servers with the same handlers, and clients that all look blocking."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ephemeron.communication.rpc import BlockingClient, BlockingServer, Client, Options, Receive, Server, cancelled

TOKEN = "a secret of these tests"
PATIENCE_S = 120
"""Nothing here takes long; what takes as long as this hangs."""


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


class Handlers:
    """What the servers can do, and what became of it."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        """Released once by each handler that waits."""
        self.cancelled = threading.Semaphore(0)
        """Released once by each handler that learned that nobody wants its answer."""
        self.release = threading.Event()
        self.kept: list[Any] = []
        self.types: list[type] = []

    def plain(self, method: str, params: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        match method:
            case "echo":
                self.types = [type(buffer) for buffer in buffers]
                return params, buffers
            case "keep":
                self.kept += buffers
                return {}, []
            case "kept":
                return {}, self.kept
            case "make":
                return {}, [bytes([n % 256]) * n for n in params["sizes"]]
            case "fail":
                raise KeyError("no such thing")
            case "no json":
                return {"strange": {1, 2}}, []
        raise LookupError(method)

    def objects(self, method: str, value: Any) -> Any:
        if method == "fail":
            raise KeyError("no such object")
        if method == "type":
            return type(value).__name__
        return value

    def blocking(self, method: str, params: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        if method not in ("wait", "hang"):
            return self.plain(method, params, buffers)
        self.entered.release()
        while not (method == "wait" and self.release.wait(0.01)):
            if cancelled():
                self.cancelled.release()
                raise InterruptedError
            self.release.wait(0.01)
        return params, buffers

    async def asynchronous(self, method: str, params: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        if method not in ("wait", "hang"):
            return self.plain(method, params, buffers)
        self.entered.release()
        try:
            while not (method == "wait" and self.release.is_set()):  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
        return params, buffers

    async def asynchronous_objects(self, method: str, value: Any) -> Any:
        return self.objects(method, value)


class Served:
    """A server of one face, on TCP and on a Unix socket."""

    def __init__(self, face: str, loop: Loop, handlers: Handlers, path: Path, options: Options | None) -> None:
        self.handlers, self.path, self._loop = handlers, path, loop
        self.server: Any
        if face == "blocking":
            self.server = BlockingServer(handlers.blocking, objects=handlers.objects, token=TOKEN, options=options)
            self.port = self.server.listen_tcp()[1]
            self.server.listen_unix(path)
            self.close = self.server.close
        else:
            self.server = Server(handlers.asynchronous, objects=handlers.asynchronous_objects, token=TOKEN, options=options)
            self.port = loop.run(self.server.listen_tcp())[1]
            loop.run(self.server.listen_unix(path))
            self.close = lambda: loop.run(self.server.close())

    def connect(self, face: str, transport: str, *, token: str = TOKEN, options: Options | None = None) -> Any:
        kind: Any = BlockingClient if face == "blocking" else Client
        if transport == "tcp":
            dialing = kind.connect_tcp("127.0.0.1", self.port, token=token, options=options)
        else:
            connect = kind.connect_unix if transport == "unix" else kind.connect_shared
            dialing = connect(self.path, token=token, options=options)
        return dialing if face == "blocking" else Dull(self._loop, self._loop.run(dialing))


class Dull:
    """An asyncio `Client` that looks blocking."""

    def __init__(self, loop: Loop, inner: Any) -> None:
        self._loop, self._inner = loop, inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        def call(*args: Any, **more: Any) -> Any:
            return self._loop.run(found(*args, **more))

        return call

    def __enter__(self) -> Dull:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._loop.run(self._inner.__aexit__(kind, error, trace))


@contextmanager
def pair(
    tmp_path: Path, client: str, server: str, transport: str, *, options: Options | None = None, client_options: Options | None = None
) -> Iterator[tuple[Any, Served]]:
    """A connected client and its server."""
    with ExitStack() as stack:
        loop = Loop()
        stack.callback(loop.close)
        served = Served(server, loop, Handlers(), tmp_path / "s", options)
        stack.callback(served.close)
        stack.callback(served.handlers.release.set)
        connected = served.connect(client, transport, options=client_options)
        stack.callback(connected.close)
        yield connected, served


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Starts something; gives a function that waits for its result or its error."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as e:  # noqa: BLE001 - handed to whoever waits
            done.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE_S)
        assert done, "it still runs"
        if isinstance(done[0], BaseException):
            raise done[0]
        return done[0]

    return result


__all__ = ["PATIENCE_S", "TOKEN", "Handlers", "Loop", "Receive", "Served", "in_thread", "pair"]
