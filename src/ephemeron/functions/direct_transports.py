"""Transports of the direct channel that a function has, by what its platform and its environment offer; the preferred first."""

from __future__ import annotations

import os

from ephemeron.communication.channels.credentials import variable
from ephemeron.communication.direct.punching import rendezvous_transports
from ephemeron.communication.direct.tls_socket import wanted_tls
from ephemeron.communication.direct.transport import Transport, kernel_transports
from ephemeron.config.typed import near
from ephemeron.errors import JobError

TRANSPORTS_VARIABLE = "EPHEMERON_DIRECT_TRANSPORTS"
"""Names of the transports that may be used, such as `tcp,punched`; unset: all that there are."""
ENDPOINT_VARIABLE = "EPHEMERON_ENDPOINT"
"""1 in functions that have an HTTPS endpoint of their own which others may connect to."""
NAMES = ("shared", "unix", "tcp", "websocket", "punched", "relay")


def own_transports() -> list[Transport]:
    """Those of the kernel, of an endpoint where the function has one, and of a rendezvous service where one is set.

    Raises:
        JobError: a variable of the environment is wrong.
        MissingExtra: TLS is asked for, and nothing can make certificates.
    """
    tls = wanted_tls()
    made = (*kernel_transports(tls=tls), *_endpoint_transports(), *rendezvous_transports(tls=tls))
    found = {transport.name: transport for transport in made}
    wanted = [name.strip() for name in (variable(TRANSPORTS_VARIABLE) or "").split(",") if name.strip()]
    for name in wanted:
        if name not in NAMES:
            raise JobError(f"{TRANSPORTS_VARIABLE} names {name!r}, which is no transport", remedy=near(name, NAMES))
    if not wanted:
        return list(found.values())
    return [found[name] for name in wanted if name in found]


def _endpoint_transports() -> list[Transport]:
    if os.environ.get(ENDPOINT_VARIABLE) != "1":
        return []
    from ephemeron.communication.direct.websocket import WebSocketTransport
    from ephemeron.functions.aws_microvm.endpoint import listening_host, own_endpoints

    endpoints = own_endpoints()
    return [] if endpoints is None else [WebSocketTransport(endpoints, host=listening_host())]
