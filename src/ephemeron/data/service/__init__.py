"""Loading as a service: loader functions that many jobs share (DPFlow chapter 4).

    reader ──register, access──▶ coordinator ──starts, looks after──▶ router (one per flow)
       │                                                                │ starts, looks after
       │──── routes, samples drawn together ───────────────────────────▶│
       │                                                                ▼
       └──── batches ◀──────────────────────── shards ◀──results── loader functions (any platform)
                                                  └──────tasks──────────▶

Control goes down, data comes up, and each part is a process that may be killed: what it decided can be decided again.

    reader        RemoteReader: what users see
    client        finding the parts, and finding them again;  remote: batches under way;  shared: orders drawn together
    coordinator   flows and their life (lifecycle), routers
    router        shards, generations of routes;  traversal: sampling for several jobs, journalled
    shard         threads around core: the decisions, and the bytes;  crew: its loaders on a platform
    loader        the function that loads;  packing: samples on the wire
    keeper        processes that outlive who started them;  process: their main;  address: how they are reached

Killed loaders: their tasks are done by others. Killed shard: started anew and empty; readers ask again. Killed router:
started anew; shards are found again, the journal says what was drawn. Killed coordinator: started anew by the next who needs
it (this machine's own) or by whoever keeps it; nothing else stands still. Everything stops by itself when nobody reads.
"""

from ephemeron.data.service.client import Service, own_token
from ephemeron.data.service.coordinator import ServiceSettings
from ephemeron.data.service.reader import RemoteReader

__all__ = ["RemoteReader", "Service", "ServiceSettings", "own_token"]
