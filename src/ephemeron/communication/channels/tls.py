"""Authorities that TLS connections of channels trust, and their failures in one line.

Certificates are always verified: the chain, the dates and the host name. There is no switch that turns it off; a server
with a certificate of a private authority is trusted by naming that authority:

    EPHEMERON_CHANNEL_CA    a PEM file, or its text: trusted for caches (rediss://) beside the system's authorities
    SSL_CERT_FILE           a PEM file, for caches and object stores: trusted instead of the system's

The text form is for functions, which have environment variables and no files of the client: `cloud deploy` reads the file and
passes its text. Certificates are not secret.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from ephemeron.errors import JobError

CA_ENV = "EPHEMERON_CHANNEL_CA"
_BEGIN = "-----BEGIN CERTIFICATE-----"


def authority() -> str | None:
    """The authority of EPHEMERON_CHANNEL_CA as PEM text; None where none is set.

    Raises:
        JobError: a file that cannot be read, or no certificate in it.
    """
    given = os.environ.get(CA_ENV, "").strip()
    if not given:
        return None
    if not given.startswith("-----BEGIN"):
        try:
            text = Path(given).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) and e.strerror else "it is no text"
            raise JobError(f"{CA_ENV} names a file that cannot be read: {given}: {why}", remedy="give a file of PEM certificates") from None
        where = given
    else:
        text, where = given, "its text"
    try:
        if _BEGIN not in text:
            raise ssl.SSLError("no certificate in it")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except ssl.SSLError as e:
        reason = e.args[-1] if e.args else ""
        raise JobError(
            f"{CA_ENV} holds no PEM certificate ({where}: {reason})", remedy="give the authority's certificate, which begins with " + _BEGIN
        ) from None
    return text


def for_functions() -> dict[str, str]:
    """The variable that functions elsewhere are given, with the authority's text; empty where none is set.

    Raises:
        JobError: see `authority`.
    """
    text = authority()
    return {} if text is None else {CA_ENV: text}


def is_refused(e: BaseException) -> bool:
    """Whether the next connection would fail like this one: by the certificate, or by a server without TLS."""
    seen = _tls_error(e)
    return isinstance(seen, ssl.SSLCertVerificationError) or getattr(seen, "reason", "") in _NOT_TLS


def _tls_error(e: BaseException) -> ssl.SSLError | ssl.CertificateError | None:
    seen: BaseException | None = e
    while seen is not None and not isinstance(seen, (ssl.SSLError, ssl.CertificateError)):
        seen = seen.__cause__ or seen.__context__
    return seen


def explain_tls(e: BaseException) -> str | None:
    """Problem and remedy of a failure of TLS, in one line; None: TLS is not the cause.

    Args:
        e: as it was caught; what it came from is looked at, too.
    """
    seen = _tls_error(e)
    if seen is None:
        return None
    if isinstance(seen, ssl.SSLCertVerificationError):
        return _unverified(seen.verify_message or str(seen))
    if getattr(seen, "reason", "") in _NOT_TLS:
        return "what answers there does not speak TLS; write redis:// for a server without it, or give its TLS port"
    return f"the TLS handshake failed ({getattr(seen, 'reason', '') or seen}); check that both ends speak TLS 1.2 or later"


_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL")


def _unverified(message: str) -> str:
    text = message.lower()
    if "expired" in text:
        return "its certificate has expired; renew it on the server, or set this machine's clock"
    if "not yet valid" in text:
        return "its certificate is not valid yet; set this machine's clock, or the server's"
    if "mismatch" in text or "not valid for" in text:
        return f"its certificate is for another host ({message}); use the host name that the certificate has"
    return f"its certificate is not signed by an authority that is trusted here ({message}); set {CA_ENV} to the authority's PEM file"
