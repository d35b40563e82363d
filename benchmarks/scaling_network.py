"""A modelled network in virtual time, on which the real client and the real shards of the sparse store run unchanged.

Connections carry the real bytes: the proof of the token, frames, acknowledgements. Modelled are the bandwidth of each machine in
each direction (messages one after the other), the latency of each message, and the CPU time of a shard for each frame: a shard takes
one frame at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ephemeron.communication.channels.wrappers import LinkModel
from ephemeron.functions.simulation import VirtualTimeLoop
from ephemeron.sparse.store.frame import HEAD_BYTES, Head, unpack

T = TypeVar("T")


class Host:
    """A machine on the network.

    Args:
        bandwidth_mb_s: MB/s in each direction.
        service_s: CPU seconds for a frame that has arrived, which is then taken by the program; None: no time.
    """

    def __init__(self, bandwidth_mb_s: float, service_s: Callable[[Head], float] | None = None) -> None:
        self.up, self.down = LinkModel(bandwidth_mb_s), LinkModel(bandwidth_mb_s)
        self.busy_s = 0.0
        """CPU seconds so far."""
        self._service_s = service_s
        self._free_at = 0.0

    def taken_at(self, now: float, data: bytes) -> tuple[float, float]:
        """When the program will have taken what has just arrived, and the CPU seconds that this costs."""
        if self._service_s is None or not _is_frame(data):
            return now, 0.0
        seconds = self._service_s(unpack(data))
        self._free_at = max(now, self._free_at) + seconds
        return self._free_at, seconds


def _is_frame(data: bytes) -> bool:
    """Whether this is one frame, and not a part of the proof of the token, which may begin with the same two bytes."""
    return len(data) >= HEAD_BYTES and data.startswith(b"ES") and int.from_bytes(data[8:16], "little") == len(data) - HEAD_BYTES


HOST: contextvars.ContextVar[Host] = contextvars.ContextVar("host")
"""Machine of the code that connects."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Stands for a listening socket: the address and the machine."""

    name: str
    host: Host

    def getsockname(self) -> tuple[str, int]:
        """Address."""
        return self.name, 0

    def close(self) -> None:
        """Does nothing."""


class _SocketOptions:
    def setsockopt(self, *arguments: int) -> None:
        """There is no socket whose options could be set."""


class _Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, host: Host, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._network, self._host, self._protocol = network, host, protocol
        self._closing = False
        self.peer: _Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _SocketOptions() if name == "socket" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            sent = self._host.up.reserve(self._network.time(), len(data))
            self._network.call_at(sent + self._network.latency_s, self.peer.reached, bytes(data))

    def reached(self, data: bytes) -> None:
        """The first byte is at the machine's connection."""
        received = self._host.down.reserve(self._network.time(), len(data))
        self._network.call_at(received, self._arrived, data)

    def _arrived(self, data: bytes) -> None:
        at, seconds = self._host.taken_at(self._network.time(), data)
        self._network.call_at(at, self._taken, data, seconds)

    def _taken(self, data: bytes, seconds: float) -> None:
        self._host.busy_s += seconds
        left = memoryview(data)
        while left and not self._closing:
            buffer = self._protocol.get_buffer(len(left))
            size = min(len(buffer), len(left))
            buffer[:size] = left[:size]  # type: ignore[index]
            self._protocol.buffer_updated(size)
            left = left[size:]

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        raise NotImplementedError("this network has no back-pressure: reading cannot pause")

    def resume_reading(self) -> None:
        """Reading does not pause."""

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        for end in (self, self.peer):
            if not end._closing:
                end._closing = True
                self._network.call_soon(end._protocol.connection_lost, None)


class Network(VirtualTimeLoop):
    """An event loop whose connections and servers are those of the modelled network.

    Args:
        latency_s: seconds of each message between two machines.
    """

    def __init__(self, latency_s: float) -> None:
        super().__init__()
        self.latency_s = latency_s
        self._served: dict[str, tuple[Host, Callable[[], Any]]] = {}

    async def create_server(self, factory: Callable[[], Any], *, sock: Endpoint) -> None:  # type: ignore[override]
        self._served[sock.name] = sock.host, factory

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[asyncio.Transport, Any]:
        await asyncio.sleep(2 * self.latency_s)
        server_host, server_factory = self._served[host]
        client, server = factory(), server_factory()
        near, far = _Transport(self, HOST.get(), client), _Transport(self, server_host, server)
        near.peer, far.peer = far, near
        server.connection_made(far)
        client.connection_made(near)
        return near, client


def run(main: Coroutine[Any, Any, T], *, latency_s: float) -> T:
    """Runs a coroutine on such a loop."""
    with asyncio.Runner(loop_factory=lambda: Network(latency_s)) as runner:
        return runner.run(main)
