"""Framed messages between processes that can reach each other: request and reply, without copies and without pickle.

One connection carries any number of calls at once. A frame is a fixed header, a little JSON and raw buffers;
buffers go from the caller's memory to the socket and from the socket to fresh memory, nothing in between. Both
sides prove that they know a shared token before the first call; the token itself is never sent. Frames are not
encrypted: beyond loopback, use a network you trust or a tunnel.

    server = Server(handler, token=token)
    host, port = await server.listen_tcp()
    client = await Client.connect_tcp(host, port, token=token)
    reply, buffers = await client.call("add", {"n": 1}, [vector])

Measured on two cores: 0.1 ms for an empty call; 40 ms for 47 MB there and back, up to 220 where the system must
first provide fresh memory.
Not for the open internet, and not for streams without end: every frame has a length.
"""

from ephemeron.rpc.client import Client
from ephemeron.rpc.errors import ProtocolError, RemoteError, TokenRefused
from ephemeron.rpc.frame import Buffer
from ephemeron.rpc.server import Handler, Server

__all__ = ["Buffer", "Client", "Handler", "ProtocolError", "RemoteError", "Server", "TokenRefused"]
