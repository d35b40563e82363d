"""An authority, and certificates of regions that it signs, as files."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from ephemeron.training.worker.spec import GroupNetwork


class Authority:
    """A private authority with its files in a folder."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("cryptography", reason="cryptography makes the certificates of this test")
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._x509 = folder, x509
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), "authority"
        self._certificate = self._signed(self._name, self._key.public_key(), authority=True)
        self.file = self._stored("authority.pem", self._certificate)

    def network(self, region: str, **values: str) -> GroupNetwork:
        """A region that listens on loopback, with a certificate of its own."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._stored(f"{region}.pem", self._signed(region, key.public_key()))
        secret = self.folder / f"{region}.key"
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        given = {"listen": "127.0.0.1:0", **values}
        return GroupNetwork(authority=str(self.file), certificate=str(certificate), certificate_key=str(secret), **given)

    def _signed(self, name: str, key: object, *, authority: bool = False) -> object:
        from cryptography.hazmat.primitives import hashes

        x509, now = self._x509, datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self._name)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())

    def _stored(self, name: str, certificate: object) -> Path:
        from cryptography.hazmat.primitives import serialization

        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))  # type: ignore[attr-defined]
        return path
