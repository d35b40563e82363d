"""Loading as a service: loader functions that many jobs share (DPFlow chapter 4).

    reader ──register, access──▶ coordinator ──starts, monitors──────▶ router (one per flow)
       │                                                                │ starts, monitors
       │──── routes, samples drawn together ───────────────────────────▶│
       │                                                                ▼
       └──── batches ◀──────────────────────── shards ◀──results── loader functions (any platform)
                                                  └──────tasks──────────▶

Control goes down, data comes up, and each part is a process that may be killed: its decisions can be made again.

    reader        RemoteReader: what users see
    client        calls to the parts, which are found again;  remote_pool: batches under way, orders drawn together
    protocol      calls;  messages: requests and replies;  settings: also timeouts and addresses
    coordinator   flows and their life cycle, routers
    router        shards, generations of routes;  shared_epochs: sampling for several jobs, journalled
    shard         threads around shard_state: the decisions, and the bytes;  loader_fleet: its loaders on a platform
    loader        the function that loads;  sample_codec: samples on the wire
    daemon        processes that outlive their starter;  process: their main

Killed loaders: their tasks are done by others. Killed shard: replaced by an empty one; readers repeat their requests. Killed router:
replaced; shards are found again, the journal has what was drawn. Killed coordinator: restarted by the next reader (this machine's own
service) or by its operator; the other parts continue. Everything ends by itself when there are no readers.
"""

from ephemeron.data.service.client import Service, own_token
from ephemeron.data.service.reader import RemoteReader
from ephemeron.data.service.settings import ServiceSettings

__all__ = ["RemoteReader", "Service", "ServiceSettings", "own_token"]
