"""`ephemeron serve rendezvous`: the service through which functions behind address translators (NAT) find and reach each other."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ephemeron.cli.bounds import label_option

_File = click.Path(exists=True, dir_okay=False, path_type=Path)


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
