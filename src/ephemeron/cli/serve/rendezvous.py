"""`ephemeron serve rendezvous`: the service through which functions behind address translators (NAT) find and reach each other."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import ssl

    from ephemeron.communication.direct.rendezvous_service import ServiceLimits

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
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it is ready, and one at the end.")
def rendezvous(
    listen: str,
    allow_remote: bool,
    token_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    max_relayed_gb: float,
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
    import asyncio

    from ephemeron.communication.direct.rendezvous import TOKEN_VARIABLE
    from ephemeron.communication.direct.rendezvous_service import ServiceLimits
    from ephemeron.communication.direct.tls_socket import server_context
    from ephemeron.communication.rpc import is_loopback
    from ephemeron.errors import JobError

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise JobError(f"--listen {listen!r} is no address", remedy="give HOST:PORT, such as 127.0.0.1:7071")
    if not allow_remote and not is_loopback(host.strip("[]")):
        raise JobError(f"{host} can be reached from other machines", remedy="add --allow-remote if that is meant")
    token = (token_file.read_text() if token_file else os.environ.get(TOKEN_VARIABLE, "")).strip()
    if not token:
        raise JobError(f"{token_file or 'the service'} has no token", remedy=f"give --token-file FILE, or set {TOKEN_VARIABLE}")
    if (tls_certificate is None) != (tls_key is None):
        raise JobError("a certificate and its key belong together", remedy="give --tls-certificate and --tls-key")
    context = server_context(tls_certificate, tls_key) if tls_certificate and tls_key else None
    limits = ServiceLimits(relayed_bytes=int(max_relayed_gb * (1 << 30)))
    asyncio.run(_serve(host.strip("[]"), int(port), allow_remote, token, limits, context, as_json))


async def _serve(
    host: str, port: int, allow_remote: bool, token: str, limits: ServiceLimits, context: ssl.SSLContext | None, as_json: bool
) -> None:
    import asyncio
    import signal

    from ephemeron.communication.direct.rendezvous import ServiceAddress
    from ephemeron.communication.direct.rendezvous_service import RendezvousService
    from ephemeron.errors import JobError

    service, over = RendezvousService(token, limits=limits, tls=context), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    try:
        address = ServiceAddress(*await service.listen(host, port, allow_remote=allow_remote), context is not None)
    except OSError as e:
        raise JobError(f"cannot listen at {host}:{port}: {e.strerror or e}", remedy="give another --listen") from None
    click.echo(json.dumps({"address": str(address)}) if as_json else f"rendezvous service at {address}; Ctrl-C ends it")
    try:
        await over.wait()
    finally:
        done = service.statistics()
        await service.close()
    text = f"{done.meetings} pairs were introduced, {done.relayed_bytes / 1e6:.1f} MB relayed"
    click.echo(json.dumps(asdict(done)) if as_json else text)
