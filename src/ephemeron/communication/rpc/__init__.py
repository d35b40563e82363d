"""Framed messages between processes that can reach each other, without copies (CRPC: DPFlow section 4.3.1).

One connection carries any number of concurrent calls, answered in any order. A frame is a fixed head, a little JSON and
raw buffers; buffers go from the caller's memory to the socket and from the socket to their final place without a copy
in between. Both ends prove that they know a shared token before the first frame;
the token itself is never sent. Frames are not encrypted: beyond loopback, use a network you trust or a tunnel.

    server = Server(handler, token=token)                   # BlockingServer(...)
    host, port = await server.listen_tcp()
    client = await Client.connect_tcp(host, port, token=token)      # BlockingClient.connect_tcp(...)
    reply, buffers = await client.call("add", {"n": 1}, [vector], timeout_s=5)
    batch = await client.call_object("load", [3, 1, 4])     # pickles, if the server takes objects

Interfaces: `Client` and `Server` on asyncio, `BlockingClient` and `BlockingServer` for threads, with the same protocol.
Transports: TCP, Unix sockets, and shared memory between processes of one host (`connect_shared`).

Received buffers: under `Receive.VIEWS`, `memoryview`s, and arrays on them, in memory that is used again
once nothing refers to it; one kept view keeps its whole frame. Under `Receive.COPIES`, real
`bytes`, and arrays that own their memory. `call` returns views by default, `call_object` copies.

A call can have a timeout, which the server receives, too. A lost connection is not made anew: the caller connects again.

Forks: a connection belongs to the process that made it. A child's copies are closed as it begins, using them raises
`ConnectionLost`, and received views stay valid (those in shared memory: only as long as the parent keeps them).

Figures and their commands: `benchmarks/README.md`. Not for the open internet, and not across languages: DPFlow's own
core is Rust behind PyO3, ours is Python that leaves all bytes to the system.
"""

from ephemeron.communication.rpc.blocking_client import BlockingClient
from ephemeron.communication.rpc.blocking_server import BlockingHandler, BlockingServer, cancelled
from ephemeron.communication.rpc.client import Client
from ephemeron.communication.rpc.frame import Buffer, FrameLimits, Receive
from ephemeron.communication.rpc.memory import BufferPool, keep_freed
from ephemeron.communication.rpc.options import Options
from ephemeron.communication.rpc.server import Handler, Server
from ephemeron.communication.rpc.sockets import is_loopback
from ephemeron.errors import CallTimedOut, ConnectionLost, ProtocolError, RemoteError, TokenRefused

__all__ = [
    "BlockingClient",
    "BlockingHandler",
    "BlockingServer",
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
    "RemoteError",
    "Server",
    "TokenRefused",
    "cancelled",
    "is_loopback",
    "keep_freed",
]
