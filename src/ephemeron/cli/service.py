"""`ephemeron data serve | status`: a data service that training jobs share, and its status."""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.data.service import Service
    from ephemeron.data.service.lifecycle import FlowEntry
    from ephemeron.data.service.messages import RouterStatus

_log = logging.getLogger(__name__)

_folder = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the service's state.  [default: ~/.ephemeron/data-service]",
)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0: any free one.")
@click.option("--allow-remote", is_flag=True, help="Let other machines in, if --host can be reached from them.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="Shards of each flow.")
@click.option("--loaders", type=click.IntRange(1), help="Loader functions of each flow, at most.  [default: one per CPU]")
@click.option(
    "--loader-memory-mb", type=click.IntRange(128), default=1769, show_default=True, help="Memory quota of a loader; CPU in proportion."
)
@click.option(
    "--buffer-mb",
    type=click.FloatRange(1),
    default=1024.0,
    show_default=True,
    help="Memory for samples that are loaded ahead, for each flow.",
)
@click.option(
    "--cache-mb",
    type=click.FloatRange(0),
    default=1024.0,
    show_default=True,
    help="Memory for samples that are kept for later epochs and other jobs, for each flow.",
)
@click.option(
    "--idle-s",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Seconds without a reader after which the loaders of a flow end.",
)
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it is ready.")
def serve(
    host: str,
    port: int,
    allow_remote: bool,
    shards: int,
    loaders: int | None,
    loader_memory_mb: int,
    buffer_mb: float,
    cache_mb: float,
    idle_s: float,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Load data for many training jobs: serves until Ctrl-C.

    Jobs that read the same flow share its loaders, its cache and, if requested, the order of samples. Loaders are functions
    with a memory quota and a timeout; their number follows demand, and is zero without readers.

    \b
    ephemeron data serve --port 7070 --loaders 4 --cache-mb 4096
    # in a training script
    reader = RemoteReader("127.0.0.1:7070", token=...)    # or EPHEMERON_DATA_TOKEN
    batches = flow.prepare_read(reader).to_shuffled(batch_size=128, sampling="shared")

    The token is that of EPHEMERON_DATA_TOKEN, or one that is made and kept in FOLDER/token. A service that was killed
    continues when it is started again with the same folder.
    """
    from ephemeron.communication.rpc import is_loopback
    from ephemeron.config.paths import home
    from ephemeron.data.service import ServiceSettings, own_token
    from ephemeron.data.service.address import TOKEN_VARIABLE
    from ephemeron.data.service.daemon import ManagedProcess
    from ephemeron.data.service.shutdown import ShutdownSignal
    from ephemeron.errors import JobError, ServiceUnreachable

    place = (folder or home() / "data-service").absolute()
    if not allow_remote and not is_loopback(host):
        raise JobError(f"{host!r} can be reached from other machines", remedy="add --allow-remote if that is meant")
    settings = ServiceSettings(
        shards=shards,
        loaders=loaders or os.cpu_count() or 1,
        loader_memory_mb=loader_memory_mb,
        buffer_mb=buffer_mb,
        cache_mb=cache_mb,
        idle_s=idle_s,
        host=host,
        port=port,
        allow_remote=allow_remote,
    )
    token = os.environ.get(TOKEN_VARIABLE) or own_token(place)
    part = ManagedProcess("coordinator", place, token)
    try:
        running = part.address()
    except ServiceUnreachable:
        pass
    else:
        raise JobError(f"a data service with this folder runs at {running}", remedy="use it, or end it, or give --folder")
    over = ShutdownSignal()
    address = part.ensure(settings)
    where = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else str(place / "token")
    if as_json:
        click.echo(json.dumps({"address": str(address), "folder": str(place), "token_in": where}))
    else:
        click.echo(f"data service at {address}, token in {where}; Ctrl-C ends it")
    try:
        while not over.wait(1.0):
            if not part.alive:
                _log.warning("the coordinator has ended: starting it again")
                part.ensure(replace(settings, port=address.port))
    finally:
        part.kill(gently=True, wait_s=30)


@click.command()
@click.option(
    "--address", metavar="HOST:PORT", help="Address of the service.  [default: EPHEMERON_DATA_SERVICE, else that of this machine]"
)
@_folder
@click.option("--delete", metavar="NAME", help="Remove a flow that has no readers.")
@click.option("--watch", is_flag=True, help="Repeat every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def status(address: str | None, folder: Path | None, delete: str | None, watch: bool, as_json: bool) -> None:
    """Show the flows of a data service with their states, readers, loaders and caches.

    \b
    ephemeron data status
    ephemeron data status --address 10.0.0.5:7070 --watch              with EPHEMERON_DATA_TOKEN set
    """
    from ephemeron.config.paths import home
    from ephemeron.data.flow_spec import SERVICE_VARIABLE
    from ephemeron.data.service import Service
    from ephemeron.data.service.daemon import ManagedProcess
    from ephemeron.data.service.messages import FlowRequest
    from ephemeron.data.service.protocol import DELETE_FLOW
    from ephemeron.errors import ServiceUnreachable

    if address is None and folder is None:  # as readers find it
        address = os.environ.get(SERVICE_VARIABLE) or None
    if address is None:  # do not start one to ask it
        place = folder or home() / "data-service"
        if not ManagedProcess("coordinator", place, "").alive:
            raise ServiceUnreachable(f"no data service runs with folder {place}; start one with: ephemeron data serve")
    service = Service(address, folder=folder, timeout_s=5.0)
    if delete is not None:
        service.call(DELETE_FLOW, FlowRequest(flow=delete))
    while True:
        _print(service, as_json)
        if not watch:
            return
        time.sleep(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRow:
    """Status of a flow, with sums over its shards."""

    flow: str
    version: int
    state: str
    samples: int
    readers: int
    shards: int
    loaders: int
    loaded: int
    hits: int
    """Samples that were found finished in the cache."""
    half_hits: int
    """Samples of which the cached steps were found."""
    skipped: int
    cached_bytes: int
    buffered_bytes: int


def _print(service: Service, as_json: bool) -> None:
    from ephemeron.data.service.messages import Nothing, RouterStatus
    from ephemeron.data.service.protocol import LIST_FLOWS
    from ephemeron.units import human_bytes

    found = service.call(LIST_FLOWS, Nothing())
    rows = [_row(entry, found.routers.get(entry.name, RouterStatus())) for entry in found.flows]
    if as_json:
        click.echo(json.dumps({"flows": [asdict(row) for row in rows]}))
        return
    if not rows:
        click.echo("no flows are registered")
    for r in rows:
        click.echo(
            f"{r.flow}@{r.version}: {r.state}, {human_count(r.samples, 'sample')}; {human_count(r.readers, 'reader')}, {r.loaders} "
            f"loaders; {r.loaded} loaded, {r.hits} found finished, {r.half_hits} half-finished; "
            f"{human_bytes(r.cached_bytes)} kept, {human_bytes(r.buffered_bytes)} ahead"
        )


def _row(entry: FlowEntry, router: RouterStatus) -> FlowRow:
    shards = router.shards
    return FlowRow(
        flow=entry.name,
        version=entry.version,
        state=entry.state,
        samples=entry.samples,
        readers=router.readers,
        shards=len(shards),
        loaders=sum(s.loaders for s in shards),
        loaded=sum(s.loaded for s in shards),
        hits=sum(s.hits for s in shards),
        half_hits=sum(s.half_hits for s in shards),
        skipped=sum(s.skipped for s in shards),
        cached_bytes=sum(s.cached_bytes for s in shards),
        buffered_bytes=sum(s.buffered_bytes for s in shards),
    )
