"""The parameter store of sparse models as a service of this machine (`runs.services`): its shards are processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from ephemeron.config.typed import Typed, build, plain
from ephemeron.events import StoreRequests
from ephemeron.runs.services import Said, ServiceRun, read_token
from ephemeron.sparse.store.processes import ShardProcesses
from ephemeron.sparse.store.shard import TOKEN_VARIABLE, ShardOptions

ADDRESS = "channel"
"""Private setting: address of the channel with its credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings(Typed):
    """Settings of the service."""

    shards: tuple[ShardOptions, ...]
    channel: str = ""
    """Address for snapshots and logs, without credentials; empty: none."""
    token_file: str = ""
    """File with the token; empty: an environment variable has it."""


async def serve(service: ServiceRun) -> Said:
    """See `runs.services.Serve`."""
    o = build(StoreSettings, service.header.payload, where=f"settings of {service.header.run_id}")
    token = read_token(o.token_file, TOKEN_VARIABLE, "the store")
    processes = ShardProcesses(o.shards, token=token, channel=service.private.get(ADDRESS, o.channel))
    addresses = await processes.start()
    said = Said(
        f"sparse store at {', '.join(addresses)}; Ctrl-C ends it",
        {"addresses": addresses, "pids": processes.pids, "run_id": service.header.run_id},
    )
    shards = tuple(replace(each, port=int(at.rpartition(":")[2])) for each, at in zip(o.shards, addresses, strict=True))
    ending, dying = asyncio.create_task(service.over.wait()), asyncio.create_task(processes.wait())
    try:
        service.ready(said, address=",".join(addresses), payload=plain(replace(o, shards=shards)))
        await asyncio.wait({ending, dying}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            dying.result()
    finally:
        ending.cancel()
        dying.cancel()
        await processes.close()
        if service.run.begun:
            service.run.emit(StoreRequests(t=service.run.t, source="shards", traffic=processes.traffic))
    gets, pushes = (sum(getattr(report, name) for report in processes.reports) for name in ("gets", "pushes"))
    return Said(
        f"{gets} multi-gets and {pushes} changes were served; {processes.restarts} shards were started again",
        {"gets": gets, "pushes": pushes, "restarts": processes.restarts},
    )
