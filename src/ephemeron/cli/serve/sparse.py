"""`ephemeron serve sparse`: the parameter store of sparse models, as processes of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ephemeron.cli.bounds import label_option

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
@label_option
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
    labels: dict[str, str],
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
    from ephemeron.communication.channels.credentials import public_address
    from ephemeron.communication.rpc import is_loopback
    from ephemeron.config.typed import plain
    from ephemeron.errors import JobError
    from ephemeron.runs import services
    from ephemeron.sparse.store.journal import JournalOptions
    from ephemeron.sparse.store.places import NAME
    from ephemeron.sparse.store.processes import ADDRESS, StoreSettings
    from ephemeron.sparse.store.shard import TOKEN_VARIABLE, ShardOptions

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) + shards > 65_536:
        raise JobError(f"--listen {listen!r} is no address", remedy="give HOST:PORT, such as 127.0.0.1:7090")
    host = host.strip("[]")
    if not allow_remote and not is_loopback(host):
        raise JobError(f"{host} can be reached from other machines", remedy="add --allow-remote if that is meant")
    secret = "" if token_file is None else str(token_file.absolute())
    services.read_token(secret, TOKEN_VARIABLE, "the store")
    if log and not address:
        raise JobError("--log has no place", remedy="give --store URL")
    if NAME.fullmatch(name) is None:
        raise JobError(f"--name {name!r} is no name", remedy="use letters, digits, dots, dashes and underscores")
    journal = JournalOptions(snapshot_s=snapshot_s, log=log, log_interval_s=log_interval_ms / 1000)
    options = tuple(
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
    )
    settings = StoreSettings(shards=options, channel=public_address(address)[0], token_file=secret)

    def show(said: services.Said) -> None:
        click.echo(json.dumps(said.document) if as_json else said.text)

    show(
        services.start(
            "sparse", plain(settings), functions=shards, servers=shards, private={ADDRESS: address}, labels=labels, on_ready=show
        )
    )
