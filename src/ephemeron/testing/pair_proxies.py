"""A TCP proxy between every two members of a direct channel, that swallows, resets, refuses, delays or slows down.

proxies = PairProxies()
mesh = await world.join(rank, transports=[proxies.transport(rank)])
proxies.swallow(0, 1)      # half-open: both ends are connected, and nothing arrives
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

from ephemeron.communication.direct.connection import Connection
from ephemeron.communication.direct.transport import Accepted, TcpTransport
from ephemeron.units import MB

_CHUNK = 1 << 16


@dataclass
class _Pair:
    """State of the network between two ranks."""

    swallows: bool = False
    refuses: bool = False
    delay_s: float = 0.0
    mb_s: float | None = None
    carried: int = 0
    """Bytes in both directions."""
    writers: set[asyncio.StreamWriter] = field(default_factory=set)


class PairProxies:
    """See the module. All methods are called in the event loop of the members."""

    def __init__(self) -> None:
        self._pairs: dict[frozenset[int], _Pair] = {}
        self._owners: dict[str, int] = {}
        self._ports: dict[tuple[int, str], int] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def transport(self, rank: int) -> ProxiedTransport:
        """The transport of a member: TCP whose connections to each other member pass a proxy."""
        return ProxiedTransport(self, rank)

    def pair(self, a: int, b: int) -> _Pair:
        """State of the network between two ranks."""
        return self._pairs.setdefault(frozenset((a, b)), _Pair())

    def swallow(self, a: int, b: int) -> None:
        """From now on connections of two ranks stay, and what is sent is lost; new ones get no answer."""
        self.pair(a, b).swallows = True

    def cut(self, a: int, b: int) -> None:
        """Resets the connections of two ranks, and refuses new ones."""
        self.pair(a, b).refuses = True
        self.reset(a, b)

    def reset(self, a: int, b: int) -> None:
        """Resets the connections of two ranks."""
        for writer in list(self.pair(a, b).writers):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def slow(self, a: int, b: int, *, delay_s: float, mb_s: float) -> None:
        """Delays and slows down all connections of two ranks, each direction on its own."""
        pair = self.pair(a, b)
        pair.delay_s, pair.mb_s = delay_s, mb_s

    def heal(self, a: int, b: int) -> None:
        """Ends all troubles of two ranks. Connections from which bytes were swallowed are reset."""
        pair = self.pair(a, b)
        if pair.swallows:
            self.reset(a, b)
        pair.swallows = pair.refuses = False
        pair.delay_s, pair.mb_s = 0.0, None

    async def close(self) -> None:
        """Ends the proxies."""
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def listens(self, rank: int, address: str) -> None:
        """A member listens at an address."""
        self._owners[address] = rank

    async def port_to(self, rank: int, address: str) -> int:
        """Port of the proxy between a rank and the member that listens at an address."""
        if (rank, address) not in self._ports:
            pair, target = self.pair(rank, self._owners[address]), int(address.rpartition("/")[2])

            async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                self._tasks.add(task)
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await _carry(pair, target, reader, writer)
                self._tasks.discard(task)
                writer.close()

            server = await asyncio.start_server(accepted, "127.0.0.1", 0)
            self._servers.append(server)
            self._ports[rank, address] = server.sockets[0].getsockname()[1]
        return self._ports[rank, address]


class ProxiedTransport(TcpTransport):
    """TCP through the proxies of a member."""

    def __init__(self, proxies: PairProxies, rank: int) -> None:
        super().__init__()
        self._proxies, self._rank = proxies, rank

    async def listen(self, token: str, accepted: Accepted) -> str | None:
        address = await super().listen(token, accepted)
        if address is not None:
            self._proxies.listens(self._rank, address)
        return address

    async def dial(self, address: str, token: str, *, timeout_s: float) -> Connection:
        port = await self._proxies.port_to(self._rank, address)
        return await super().dial(f"{self.host}/{port}", token, timeout_s=timeout_s)


async def _carry(pair: _Pair, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    if pair.refuses:
        return
    there, upward = await asyncio.open_connection("127.0.0.1", target)
    pair.writers |= {writer, upward}
    both = [asyncio.ensure_future(_pump(pair, *way)) for way in ((reader, upward), (there, writer))]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        pair.writers -= {writer, upward}
        upward.close()


async def _pump(pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop, free_at = asyncio.get_running_loop(), 0.0
    while data := await reader.read(_CHUNK):
        if pair.swallows:
            continue
        if pair.mb_s is not None:
            free_at = max(loop.time(), free_at) + len(data) / (pair.mb_s * MB)
            await asyncio.sleep(free_at + pair.delay_s - loop.time())
        pair.carried += len(data)
        writer.write(data)
        await writer.drain()
