"""Framed messages between processes that can reach each other, without copies (CRPC: DPFlow section 4.3.1).

One connection carries any number of calls at once, answered in any order, and two-way streams beside them. A frame
is a fixed head, a little JSON and raw buffers; buffers go from the caller's memory to the socket and from the
socket to where they stay, nothing in between. Both ends prove that they know a shared token before the first frame;
the token itself is never sent. Frames are not encrypted: beyond loopback, use a network you trust or a tunnel.

    server = Server(handler, token=token)                   # BlockingServer(...)
    host, port = await server.listen_tcp()
    client = await Client.connect_tcp(host, port, token=token)      # BlockingClient.connect_tcp(...)
    reply, buffers = await client.call("add", {"n": 1}, [vector], timeout_s=5)
    batch = await client.call_object("load", [3, 1, 4])     # pickles, if the server takes objects
    async with await client.stream("samples") as samples:
        await samples.send({"epoch": 1})
        async for params, buffers in samples: ...

Faces: `Client` and `Server` on asyncio, `BlockingClient` and `BlockingServer` for threads; all speak the same.
Transports: TCP, Unix sockets, and shared memory between processes of one host (`connect_shared`).

What comes back: under `Receive.VIEWS`, `memoryview`s, and arrays that stand upon them, on memory that is used again
when nothing refers to it any more, and not before; one kept view keeps its whole frame. Under `Receive.COPIES`, real
`bytes`, and arrays that own their memory. `call` gives views unless asked, `call_object` gives copies.

A slow reader of a stream stops its sender, and nobody else: each stream has a window in bytes. Every call can have a
deadline, of which the server is told. `ReconnectingClient` and `BlockingRedialing` connect anew, with back-off.

Forks: a connection belongs to the process that made it. A child's copies are closed as it begins, using them raises
`ConnectionLost`, and received views stay valid (those in shared memory: only as long as the parent keeps them).

Figures and their commands: `benchmarks/README.md`. Not for the open internet, and not across languages: DPFlow's own
core is Rust behind PyO3, ours is Python that leaves all bytes to the system.
"""

from ephemeron.communication.rpc.async_connection import AsyncStream
from ephemeron.communication.rpc.blocking_client import BlockingClient
from ephemeron.communication.rpc.blocking_connection import BlockingStream
from ephemeron.communication.rpc.blocking_server import BlockingHandler, BlockingServer, cancelled
from ephemeron.communication.rpc.client import Client
from ephemeron.communication.rpc.frame import Buffer, FrameLimits, Receive
from ephemeron.communication.rpc.options import Options
from ephemeron.communication.rpc.pool import BufferPool, keep_freed
from ephemeron.communication.rpc.reconnect import BlockingRedialing, ReconnectBackoff, ReconnectingClient
from ephemeron.communication.rpc.server import Handler, Server
from ephemeron.communication.rpc.sockets import is_loopback
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, RemoteError, StreamEnded, TokenRefused

__all__ = [
    "AsyncStream",
    "BlockingClient",
    "BlockingHandler",
    "BlockingRedialing",
    "BlockingServer",
    "BlockingStream",
    "Buffer",
    "BufferPool",
    "CallTimedOut",
    "Client",
    "ConnectionLost",
    "FrameLimits",
    "Handler",
    "Options",
    "ProtocolError",
    "Receive",
    "ReconnectBackoff",
    "ReconnectingClient",
    "RemoteError",
    "Server",
    "StreamEnded",
    "TokenRefused",
    "cancelled",
    "is_loopback",
    "keep_freed",
]
