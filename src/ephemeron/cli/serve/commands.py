"""`ephemeron serve`: services, each until Ctrl-C."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import click

from ephemeron.cli.bounds import label_option
from ephemeron.cli.serve.data import serve_data

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


@click.command("rendezvous")
@click.option("--listen", default="127.0.0.1:7071", show_default=True, metavar="HOST:PORT", help="Port 0: a free one.")
@click.option("--allow-remote", is_flag=True, help="Let other machines in, if HOST can be reached from them.")
@click.option("--token-file", type=_File, help="File with the service's token.  [default: EPHEMERON_RENDEZVOUS_TOKEN]")
@click.option("--tls-certificate", type=_File, help="PEM file of the service's certificate chain.")
@click.option("--tls-key", type=_File, help="PEM file of its private key.")
@click.option(
    "--max-relayed-gb",
    type=click.FloatRange(0),
    default=1024.0,
    show_default=True,
    help="Bytes that are relayed for one run, in GB (2^30).",
)
@label_option
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it is ready, and one at the end.")
def rendezvous(
    listen: str,
    allow_remote: bool,
    token_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    max_relayed_gb: float,
    labels: dict[str, str],
    as_json: bool,
) -> None:
    """Introduce functions that cannot be dialled to each other, and relay where that fails: serves until Ctrl-C.

    Any number of runs share it; none sees another one's functions. It keeps nothing: connections that functions have made through
    it stay when it ends, and relayed ones are made anew when it is back.

    \b
    head -c 32 /dev/urandom | xxd -p -c 64 > token
    ephemeron serve rendezvous --listen 0.0.0.0:7071 --allow-remote --token-file token
    # where the run's functions are started
    EPHEMERON_RENDEZVOUS=rendezvous.example:7071 EPHEMERON_RENDEZVOUS_TOKEN=$(cat token) ephemeron train ... --channel direct
    """
    from ephemeron.communication.direct.rendezvous import TOKEN_VARIABLE
    from ephemeron.communication.direct.rendezvous_service import ServiceLimits
    from ephemeron.communication.rpc import is_loopback
    from ephemeron.config.typed import plain
    from ephemeron.errors import JobError
    from ephemeron.runs import services
    from ephemeron.runs.rendezvous import RendezvousSettings

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise JobError(f"--listen {listen!r} is no address", remedy="give HOST:PORT, such as 127.0.0.1:7071")
    host = host.strip("[]")
    if not allow_remote and not is_loopback(host):
        raise JobError(f"{host} can be reached from other machines", remedy="add --allow-remote if that is meant")
    services.read_token(_absolute(token_file), TOKEN_VARIABLE, "the service")
    if (tls_certificate is None) != (tls_key is None):
        raise JobError("a certificate and its key belong together", remedy="give --tls-certificate and --tls-key")
    settings = RendezvousSettings(
        host=host,
        port=int(port),
        allow_remote=allow_remote,
        token_file=_absolute(token_file),
        certificate=_absolute(tls_certificate),
        key=_absolute(tls_key),
        limits=ServiceLimits(relayed_bytes=int(max_relayed_gb * (1 << 30))),
    )

    def show(said: services.Said) -> None:
        click.echo(json.dumps(said.document) if as_json else said.text)

    show(services.start("rendezvous", plain(settings), labels=labels, on_ready=show))


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())


TOKEN_VARIABLE = "EPHEMERON_DASHBOARD_TOKEN"


@click.command("dashboard")
@click.argument("roots", nargs=-1, type=click.Path(path_type=Path), metavar="[ROOT]...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7080, show_default=True, help="0: any free one.")
@click.option("--token", help=f"Secret that pages need.  [default: {TOKEN_VARIABLE}, or a new one]")
@click.option("--allow-remote", is_flag=True, help="Let other machines in, if --host can be reached from them.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="Further host name under which it is reached.")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it is ready.")
def dashboard(
    roots: tuple[Path, ...], host: str, port: int, token: str | None, allow_remote: bool, names: tuple[str, ...], show: bool, as_json: bool
) -> None:
    """Show runs, studies, data services and tasks live: serves until Ctrl-C.

    ROOT: folders with runs and studies.  [default: the home folder, and `out` of this folder]

    \b
    ephemeron serve dashboard
    ephemeron serve dashboard out --port 0 --open

    Open the address that it prints: it has the token, which the browser then keeps as a cookie. It reads what runs write, so
    runs go on without it, and it shows everything again when it is started again.
    """
    from ephemeron.config.paths import home
    from ephemeron.dashboard.server import serve
    from ephemeron.errors import JobError

    for root in roots:
        if not root.is_dir():
            raise JobError(f"there is no folder {root}")
    shown = list(roots) or [home(), *([Path("out")] if Path("out").is_dir() else [])]
    secret = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    if token is None and not secret:
        secret = secrets.token_urlsafe(32)

    def ready(address: str) -> None:
        click.echo(json.dumps({"address": address}) if as_json else f"dashboard at {address}; Ctrl-C ends it")
        if show:
            click.launch(address)

    serve(shown, host=host, port=port, token=secret, allow_remote=allow_remote, on_ready=ready, names=names)


@click.group(short_help="Serve a dashboard, data, parameters or introductions.")
def serve() -> None:
    """Serve pages of runs, data, parameters or introductions, until Ctrl-C.

    \b
    ephemeron serve dashboard                    live pages of runs in a browser
    ephemeron serve data --port 7070             load data for many training jobs
    ephemeron serve sparse --shards 2            keep the tables of sparse models
    ephemeron serve rendezvous                   introduce functions behind address translators to each other
    """


for _command in (dashboard, serve_data, sparse, rendezvous):
    serve.add_command(_command)
