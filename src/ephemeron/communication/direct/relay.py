"""Connections between members that neither can reach, relayed by the rendezvous service.

Every byte passes the service twice, and costs what its network costs: the transport for pairs for which punching fails. The
service sees the bytes: its own TLS protects them on the way to it only, that of the functions (`pinned_tls`) from end to end.
"""

from __future__ import annotations

import socket

from ephemeron.communication.channels.credentials import variable
from ephemeron.communication.direct.pinned_tls import PinnedTls
from ephemeron.communication.direct.punching import MeetingTransport, PunchedTransport
from ephemeron.communication.direct.rendezvous import SERVICE_VARIABLE, TOKEN_VARIABLE, Rendezvous, ServiceAddress
from ephemeron.communication.direct.transport import Transport
from ephemeron.errors import JobError


class RelayTransport(MeetingTransport):
    """Connections through the rendezvous service."""

    name = "relay"

    async def meet(self, ticket: str, *, timeout_s: float) -> socket.socket:
        sock = socket.socket(await self._rendezvous.family(), socket.SOCK_STREAM)
        channel, _ = await self._rendezvous.redeem(ticket, sock, timeout_s=timeout_s)
        return channel.sock


def rendezvous_transports(*, tls: PinnedTls | None = None) -> list[Transport]:
    """Transports through the service of EPHEMERON_RENDEZVOUS; none where it is not set.

    Args:
        tls: encrypts connections from end to end; None: they are plain.

    Raises:
        JobError: the address is none, or EPHEMERON_RENDEZVOUS_TOKEN is missing.
    """
    service = (variable(SERVICE_VARIABLE) or "").strip()
    if not service:
        return []
    token = (variable(TOKEN_VARIABLE) or "").strip()
    if not token:
        raise JobError(f"{SERVICE_VARIABLE} is set without {TOKEN_VARIABLE}", remedy="give the token of the service")
    member = Rendezvous(ServiceAddress.parse(service), token=token)
    return [PunchedTransport(member, tls=tls), RelayTransport(member, tls=tls)]
