"""Direct exchange between functions: every member of a run keeps connections to all others (docs/direct.md).

    store ──endpoints──▶ Mesh ◀──connections──▶ meshes of the other ranks
    PeerChannel: objects of the exchange in members' memory, all others in the store

`message`: the format. `connection`: the port of connections, and sockets. `transport`: how connections are made and proved, and bodies on one machine.
`mesh`: membership, fencing, routes. `upgrades`: better connections later. `tls_socket`: encryption. `peer_channel`: a channel on top of it. `memory_transport`: the simulated network.
"""

from ephemeron.communication.direct.connection import Connection, ConnectionHandler, LinkFailed, SocketConnection
from ephemeron.communication.direct.endpoint import Endpoint
from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.message import Head, Kind
from ephemeron.communication.direct.transport import Transport, kernel_transports

__all__ = [
    "Connection",
    "ConnectionHandler",
    "Endpoint",
    "Head",
    "Kind",
    "LinkFailed",
    "Mesh",
    "SocketConnection",
    "Transport",
    "kernel_transports",
]
