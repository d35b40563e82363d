"""TLS 1.3 between regions, each with a certificate in whose names (DNS) the region's name is, signed by an authority of the user's.

Both ends verify the other one: a region is who its certificate says. Files are named in `regions.toml`. Functions elsewhere, which have no files of
the client, get their content as variables, which precede the files:

    EPHEMERON_REGION_AUTHORITY, EPHEMERON_REGION_CERTIFICATE, EPHEMERON_REGION_KEY      PEM texts, or paths
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import tempfile
from pathlib import Path

from ephemeron.communication.channels.credentials import variable
from ephemeron.communication.direct.tls_socket import pass_through
from ephemeron.errors import JobError

VARIABLES = ("EPHEMERON_REGION_AUTHORITY", "EPHEMERON_REGION_CERTIFICATE", "EPHEMERON_REGION_KEY")
"""Certificate of the authority, that of the region, and its key."""


class MutualTls:
    """One region's end.

    Args:
        authority, certificate, key: PEM texts.

    Raises:
        JobError: they are none, or do not belong together.
    """

    def __init__(self, *, authority: str, certificate: str, key: str) -> None:
        try:
            self._client, self._server = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._server.verify_mode = ssl.CERT_REQUIRED
            with tempfile.TemporaryDirectory() as folder:  # `ssl` reads chains from files only; the folder is this user's alone
                file = Path(folder) / "pem"
                file.touch(mode=0o600)
                file.write_text(f"{key.strip()}\n{certificate.strip()}\n")
                for context in (self._client, self._server):
                    context.minimum_version = ssl.TLSVersion.TLSv1_3
                    context.load_verify_locations(cadata=authority)
                    context.load_cert_chain(file)
        except (OSError, ValueError) as e:
            raise JobError(
                f"the certificates of the region cannot be used: {e}", remedy="give PEM files of an authority, a certificate and its key"
            ) from None

    @classmethod
    def of(cls, *, authority: str, certificate: str, key: str) -> MutualTls | None:
        """From files, unless the variables are set; None: neither.

        Raises:
            JobError: one of the three is missing, or cannot be read.
        """
        named = [variable(name) or path for name, path in zip(VARIABLES, (authority, certificate, key), strict=True)]
        if not any(named):
            return None
        if not all(named):
            raise JobError("certificates of regions belong together: authority, certificate and certificate_key", remedy="give all three")
        texts = [_text(value) for value in named]
        return cls(authority=texts[0], certificate=texts[1], key=texts[2])

    async def secured(self, sock: socket.socket, *, peer: str | None, limit_s: float) -> tuple[socket.socket, frozenset[str]]:
        """Encrypts what is sent over a socket from now on.

        Args:
            sock: connected and non-blocking; owned from now on.
            peer: region that was dialled; None: this end was.
            limit_s: for the handshake.

        Returns:
            A plain socket whose bytes pass over `sock` encrypted, and the names in the other end's certificate.

        Raises:
            OSError: the handshake fails, or takes too long.
        """
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        sock = socket.socket(fileno=sock.detach())  # no other owner may close it under the event loop
        try:
            async with asyncio.timeout(limit_s):
                if peer is None:
                    transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._server)
                else:
                    transport, _ = await loop.create_connection(lambda: protocol, sock=sock, ssl=self._client, server_hostname=peer)
        except BaseException:
            sock.close()
            raise
        given = (transport.get_extra_info("peercert") or {}).get("subjectAltName", ())
        names = frozenset(name for kind, name in given if kind == "DNS")
        plain, _ = pass_through(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        return plain, names


def _text(value: str) -> str:
    if value.lstrip().startswith("-----BEGIN"):
        return value
    try:
        return Path(value).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else "it is no text"
        raise JobError(f"{value} cannot be read: {why}", remedy="give a PEM file") from None
