"""An emulated wide-area network between regions on one machine: a relay of TCP connections in user space, in a thread of its own.

    with EmulatedWan(WanLink(bandwidth_mbit_s=10, latency_s=0.05)) as wan:
        wan.link("east", "west", WanLink(bandwidth_mbit_s=2, latency_s=0.05))     # this direction only
        port = wan.route("east", "west", ("127.0.0.1", 7070))                     # how east reaches west: 127.0.0.1:port
        with wan.blackout("west"):
            ...

All connections of a pair share its bandwidth, each direction on its own. What is sent first waits for its turn at the bandwidth (as in a router's queue, of
which at most `QUEUE_S` is kept; then the sender has to wait), then takes the latency with some jitter. A lost segment arrives later by
the time of a retransmission, as TCP promises delivery, and what follows on the connection waits for it. In a blackout nothing arrives and no connection is
lost. Between the kernels of both ends and the relay there are buffers of a few MB: what a sender has sent is not what has arrived.

`wan_namespaces` adds network namespaces with the kernel's bandwidth limits and counters, where this process is root.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

QUEUE_S = 0.2
_CHUNK = 16 << 10
_SEGMENT = 1448
_BUFFER = 256 << 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WanLink:
    """One direction between two regions."""

    bandwidth_mbit_s: float | None = None
    """10^6 bits a second; None: as fast as this machine."""
    latency_s: float = 0.0
    """Delay, seconds."""
    jitter_s: float = 0.0
    """Up to so much is added to the delay, seconds."""
    loss: float = 0.0
    """Part of the segments that is lost and sent again."""
    retransmission_s: float = 0.2
    """Delay of a segment that was lost, added to the others."""


class _Direction:
    """State of one direction of a pair."""

    def __init__(self, link: WanLink) -> None:
        self.link, self.free_at = link, 0.0


class EmulatedWan:
    """See the module. All methods may be called from any thread.

    Args:
        default: link of pairs for which `link` names none.
        seed: of jitter and loss.
        enter: called first in the thread of the relay, such as to enter a namespace.
    """

    def __init__(self, default: WanLink | None = None, *, seed: int = 0, enter: Callable[[], None] = lambda: None) -> None:
        self._default, self._rng, self._enter = default or WanLink(), random.Random(seed), enter
        self._directions: dict[tuple[str, str], _Direction] = {}
        self._dark: Counter[str] = Counter()
        self._writers: dict[asyncio.StreamWriter, tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._light = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="emulated-wan", daemon=True)
        self.carried: Counter[tuple[str, str]] = Counter()
        """Bytes that were handed on, by source and target."""

    def __enter__(self) -> EmulatedWan:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._call(self._end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def link(self, source: str, target: str, link: WanLink) -> None:
        """Sets one direction of a pair, from now on."""

        async def change() -> None:
            self._direction(source, target).link = link

        self._call(change)

    def route(self, source: str, target: str, address: tuple[str, int], *, host: str = "127.0.0.1") -> int:
        """The port at which one region reaches an address of another one.

        Args:
            source, target: the two regions.
            address: in the target region.
            host: address at which the relay listens.
        """

        async def listen() -> int:
            def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = self._loop.create_task(self._relay(source, target, address, reader, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            server = await asyncio.start_server(accepted, host, 0, limit=_BUFFER)
            self._servers.append(server)
            port: int = server.sockets[0].getsockname()[1]
            return port

        return self._call(listen)

    @contextmanager
    def blackout(self, region: str) -> Iterator[None]:
        """Context in which nothing arrives from a region or there."""

        async def change(by: int) -> None:
            self._dark[region] += by
            self._light.set()
            self._light = asyncio.Event()

        self._call(lambda: change(1))
        try:
            yield
        finally:
            self._call(lambda: change(-1))

    def reset(self, region: str) -> None:
        """Resets all connections of a region."""

        async def change() -> None:
            for writer, pair in list(self._writers.items()):
                if region in pair:
                    sock = writer.get_extra_info("socket")
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    writer.transport.abort()

        self._call(change)

    # -- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._enter()
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _direction(self, source: str, target: str) -> _Direction:
        if (source, target) not in self._directions:
            self._directions[source, target] = _Direction(self._default)
        return self._directions[source, target]

    async def _relay(
        self, source: str, target: str, address: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        upward: asyncio.StreamWriter | None = None
        self._writers[writer] = (source, target)
        try:
            there, upward = await asyncio.open_connection(*address, limit=_BUFFER)
            self._writers[upward] = (source, target)
            both = [
                self._loop.create_task(self._pass(self._direction(source, target), (source, target), reader, upward)),
                self._loop.create_task(self._pass(self._direction(target, source), (target, source), there, writer)),
            ]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in both:
                    task.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        except OSError:
            pass
        finally:
            for side in filter(None, (writer, upward)):
                self._writers.pop(side, None)
                with contextlib.suppress(OSError):
                    side.close()

    async def _pass(self, direction: _Direction, pair: tuple[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Bytes of one connection in one direction, until its sender or its receiver is gone."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        delivering = self._loop.create_task(self._deliver(under_way, pair, writer))
        latest = 0.0
        try:
            while data := await reader.read(_CHUNK):
                latest = max(latest, self._arrival(direction, len(data)))
                under_way.put_nowait((latest, data))
                waiting = direction.free_at - self._loop.time() - QUEUE_S
                if waiting > 0:
                    await asyncio.sleep(waiting)
                if delivering.done():
                    return
            await under_way.join()
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    def _arrival(self, direction: _Direction, nbytes: int) -> float:
        """Time at which bytes arrive that are sent now."""
        link = direction.link
        begins = max(self._loop.time(), direction.free_at)
        rate = None if link.bandwidth_mbit_s is None else link.bandwidth_mbit_s * 1e6 / 8
        direction.free_at = begins if rate is None else begins + nbytes / rate
        delay = link.latency_s + link.jitter_s * self._rng.random()
        if link.loss and self._rng.random() < 1 - (1 - link.loss) ** -(-nbytes // _SEGMENT):
            delay += link.retransmission_s
        return direction.free_at + delay

    async def _deliver(self, under_way: asyncio.Queue[tuple[float, bytes]], pair: tuple[str, str], writer: asyncio.StreamWriter) -> None:
        while True:
            at, data = await under_way.get()
            if (left := at - self._loop.time()) > 0:
                await asyncio.sleep(left)
            while self._dark[pair[0]] or self._dark[pair[1]]:
                await self._light.wait()
            self.carried[pair] += len(data)  # first: who receives them may look
            writer.write(data)
            await writer.drain()
            under_way.task_done()
