"""A certificate authority of our own, and TLS in front of servers that have none.

The Valkey server that comes from the package index is built without TLS, and moto's certificates are its own. So a small
proxy on loopback ends TLS and passes bytes on: certificates, handshakes and failures are real, the server behind it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="no maker of certificates; pip install cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """A server's certificate with its key, as files."""

    chain: Path
    key: Path


class Authority:
    """Signs certificates.

    Args:
        folder: for its files.
        name: of it.
    """

    def __init__(self, folder: Path, name: str = "the tests' own authority") -> None:
        self.folder, self.name = folder, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._numbers = iter(range(1000))
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        built = self._builder(self.name, self._key, life=(-DAY, 10 * DAY))
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        built = built.add_extension(usage, critical=True)
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self.pem = _pem(built.add_extension(own, critical=False).sign(self._key, hashes.SHA256()))
        self.file = folder / "authority.pem"
        self.file.write_text(self.pem)

    def certificate(self, *names: str, life: tuple[datetime.timedelta, datetime.timedelta] = (-DAY, DAY)) -> Certificate:
        """For host names or IP addresses.

        Args:
            names: for which it holds.
            life: from when to when, counted from now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        built = self._builder(subject, key, life=life)
        built = built.add_extension(x509.SubjectAlternativeName([_general(n) for n in names]), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = built.add_extension(issuer, critical=False).sign(self._key, hashes.SHA256())
        stem = self.folder / f"server-{next(self._numbers)}"
        out = Certificate(stem.with_suffix(".pem"), stem.with_suffix(".key"))
        out.chain.write_text(_pem(signed))
        out.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return out

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, life: Any) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        built = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
        return built.serial_number(x509.random_serial_number()).not_valid_before(now + life[0]).not_valid_after(now + life[1])


@contextmanager
def in_front_of(port: int, certificate: Certificate) -> Iterator[int]:
    """TLS on a port of its own, which is returned; everything is passed on to `port` of this machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.chain, certificate.key)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def serve() -> asyncio.Server:
        loop.set_exception_handler(lambda *_: None)  # handshakes that fail are what some tests are about
        return await asyncio.start_server(lambda r, w: _join(r, w, port), "127.0.0.1", 0, ssl=context)

    server = asyncio.run_coroutine_threadsafe(serve(), loop).result(30)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    try:
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.close()
        return
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_pass_on(reader, onward))
            both.create_task(_pass_on(onward_reader, writer))
    except* OSError:
        pass


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
