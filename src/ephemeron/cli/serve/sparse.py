"""`ephemeron serve sparse`: the parameter store of sparse models, as processes of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ephemeron.sparse.store.processes import ShardProcesses

_File = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("sparse")
@click.option(
    "--listen",
    default="127.0.0.1:7090",
    show_default=True,
    metavar="HOST:PORT",
    help="Address of the first shard; the others have the ports after it. Port 0: free ones.",
)
@click.option("--shards", type=click.IntRange(1, 4096), default=1, show_default=True, help="Processes that divide the keys.")
@click.option("--allow-remote", is_flag=True, help="Let other machines in, if HOST can be reached from them.")
@click.option("--reached-at", default="", metavar="HOST", help="Host name that clients use.  [default: that of --listen]")
@click.option("--token-file", type=_File, help="File with the store's token.  [default: EPHEMERON_SPARSE_TOKEN]")
@click.option(
    "--store",
    "address",
    default="",
    metavar="URL",
    help="Where snapshots are kept: file:///PATH, s3://BUCKET/PREFIX, ...  [default: nowhere]",
)
@click.option("--name", default="sparse-store", show_default=True, help="Name of the store in it.")
@click.option("--snapshot-s", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Seconds between snapshots.")
@click.option("--log", is_flag=True, help="Acknowledge changes only once they are stored, so that a killed shard loses none.")
@click.option(
    "--log-interval-ms",
    type=click.FloatRange(0, min_open=True),
    default=50.0,
    show_default=True,
    help="Time for which changes are collected into one object of the log.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it is ready, and one at the end.")
def sparse(
    listen: str,
    shards: int,
    allow_remote: bool,
    reached_at: str,
    token_file: Path | None,
    address: str,
    name: str,
    snapshot_s: float,
    log: bool,
    log_interval_ms: float,
    as_json: bool,
) -> None:
    """Keep tables of parameters for sparse models: serves until Ctrl-C.

    Each shard is a process with a range of the keys of each table. One that dies is started again; with --store, it then
    has its last snapshot and, with --log, every acknowledged change. A store that is started again with the same --store
    and --name continues.

    \b
    head -c 32 /dev/urandom | xxd -p -c 64 > token
    ephemeron serve sparse --shards 2 --token-file token --store s3://bucket/models --log
    # in Python
    store = BlockingSparseStore.connect(["127.0.0.1:7090", "127.0.0.1:7091"], token)
    """
    import asyncio

    from ephemeron.communication.rpc import is_loopback
    from ephemeron.errors import JobError
    from ephemeron.sparse.store.journal import JournalOptions
    from ephemeron.sparse.store.places import NAME
    from ephemeron.sparse.store.processes import ShardProcesses
    from ephemeron.sparse.store.shard import TOKEN_VARIABLE, ShardOptions

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) + shards > 65_536:
        raise JobError(f"--listen {listen!r} is no address", remedy="give HOST:PORT, such as 127.0.0.1:7090")
    host = host.strip("[]")
    if not allow_remote and not is_loopback(host):
        raise JobError(f"{host} can be reached from other machines", remedy="add --allow-remote if that is meant")
    token = (token_file.read_text() if token_file else os.environ.get(TOKEN_VARIABLE, "")).strip()
    if not token:
        raise JobError(f"{token_file or 'the store'} has no token", remedy=f"give --token-file FILE, or set {TOKEN_VARIABLE}")
    if log and not address:
        raise JobError("--log has no place", remedy="give --store URL")
    if NAME.fullmatch(name) is None:
        raise JobError(f"--name {name!r} is no name", remedy="use letters, digits, dots, dashes and underscores")
    journal = JournalOptions(snapshot_s=snapshot_s, log=log, log_interval_s=log_interval_ms / 1000)
    processes = ShardProcesses(
        [
            ShardOptions(
                name=name,
                shard=shard,
                shards=shards,
                host=host,
                port=int(port) + shard if int(port) else 0,
                allow_remote=allow_remote,
                reached_at=reached_at,
                journal=journal,
            )
            for shard in range(shards)
        ],
        token=token,
        channel=address,
    )
    asyncio.run(_serve(processes, as_json))


async def _serve(processes: ShardProcesses, as_json: bool) -> None:
    import asyncio
    import signal

    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    addresses = await processes.start()
    if as_json:
        click.echo(json.dumps({"addresses": addresses, "pids": processes.pids}))
    else:
        click.echo(f"sparse store at {', '.join(addresses)}; Ctrl-C ends it")
    ending, dying = asyncio.create_task(over.wait()), asyncio.create_task(processes.wait())
    try:
        await asyncio.wait({ending, dying}, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            dying.result()
    finally:
        ending.cancel()
        dying.cancel()
        await processes.close()
    gets, pushes = (sum(getattr(report, name) for report in processes.reports) for name in ("gets", "pushes"))
    if as_json:
        click.echo(json.dumps({"gets": gets, "pushes": pushes, "restarts": processes.restarts}))
    else:
        click.echo(f"{gets} multi-gets and {pushes} changes were served; {processes.restarts} shards were started again")
