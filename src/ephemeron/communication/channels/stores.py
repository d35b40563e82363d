"""Opening of cloud stores, and their errors in one line."""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store

from ephemeron.communication.channels.credentials import given
from ephemeron.errors import ChannelRefused, ChannelThrottled, ChannelUnreachable, JobError

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, ObjectStore, RetryConfig, S3Config

# Time limits of a request: refused connections fail within half a second, a silent host within ten, a stalled transfer
# within a minute. Shorter read times would cut uploads, during which nothing is read.
_CLIENT: ClientConfig = {"connect_timeout": "3s", "read_timeout": "60s", "timeout": "300s"}
_RETRY: RetryConfig = {  # none: `channels.retrying` repeats requests, by one policy for all stores, and counts them
    "max_retries": 0,
    "retry_timeout": timedelta(0),
    "backoff": {"init_backoff": timedelta(0), "max_backoff": timedelta(0), "base": 2},
}
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING_CLIENT_ERRORS = ("RequestTimeout", "RequestTimeTooSkewed", "ConditionalRequestConflict", "OperationAborted")
"""Codes of answers below 500 after which the same request may succeed."""
_PASSING_LOCALLY = ("(os error 4)", "(os error 5)", "(os error 11)", "(os error 23)", "(os error 24)", "(os error 116)")
"""EINTR, EIO, EAGAIN, ENFILE, EMFILE, ESTALE."""

_REPORTED_S = 10.0


@atexit.register
def _wait_for_reports() -> None:
    """Waits, at the exit, for the threads of obstore that have reported the end of a request and are about to leave Python.

    Each needs the interpreter once more, for microseconds of a processor. One that is not scheduled before the interpreter has ended aborts
    the process: 134 instead of its exit code, one time in eight on a busy machine.
    """
    end = time.monotonic() + _REPORTED_S
    while any(_reports(frame) for frame in sys._current_frames().values()) and time.monotonic() < end:
        time.sleep(0.0005)


def _reports(frame: FrameType | None) -> bool:
    """Whether a thread entered Python to report the end of a request."""
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "call_soon_threadsafe"


_CREDENTIAL_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
"""Hosts at which machines in a cloud find their own credentials; asked if no others are set."""


def cloud_store(url: str) -> ObjectStore:
    """The obstore store of `s3://`, `gs://` or `az://`.

    Raises:
        JobError: another scheme, no bucket, credentials in the URL, or settings the store rejects.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise JobError(
            f"credentials do not belong in a {parts.scheme}:// address",
            remedy="set the cloud's usual environment variables, for example AWS_ACCESS_KEY_ID",
        )
    if parts.scheme not in ("s3", "gs", "az") or not parts.netloc:
        raise JobError(f"{url} names no bucket", remedy="write s3://bucket/prefix, gs://... or az://...")
    prefix = parts.path.strip("/") or None
    try:
        if parts.scheme == "s3":
            return _s3(parts.netloc, prefix)
        if parts.scheme == "az":
            own: AzureConfig = {}
            if name := given().get("AZURE_STORAGE_ACCOUNT_NAME"):
                own["account_name"] = name
            if key := given().get("AZURE_STORAGE_ACCOUNT_KEY"):
                own["account_key"] = key
            return AzureStore(parts.netloc, prefix=prefix, config=own, retry_config=_RETRY, client_options=_CLIENT)
        return GCSStore(parts.netloc, prefix=prefix, retry_config=_RETRY, client_options=_CLIENT)
    except Exception as e:
        raise JobError(f"{url} cannot be opened: {explain(e)}") from e


def _s3(bucket: str, prefix: str | None) -> ObjectStore:
    env = os.environ
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or env.get("AWS_ENDPOINT")
    config: S3Config = {}
    client = _CLIENT
    if key_id := given().get("AWS_ACCESS_KEY_ID"):  # obstore reads variables of the process by itself
        config["access_key_id"] = key_id
    if secret := given().get("AWS_SECRET_ACCESS_KEY"):
        config["secret_access_key"] = secret
    if "AWS_UNSIGNED_PAYLOAD" not in env:
        # The wire format has its own checksum, and hashing every byte costs more than sending it.
        config["unsigned_payload"] = True
    if endpoint:
        config["endpoint"] = endpoint
        config["virtual_hosted_style_request"] = False
        client = {**_CLIENT, "allow_http": endpoint.startswith("http://")}
    return S3Store(bucket, prefix=prefix, config=config, client_options=client, retry_config=_RETRY)


def is_missing_bucket(e: Exception) -> bool:
    """Whether a not-found is about the bucket and not about the key."""
    text = str(e)
    return any(word in text for word in ("NoSuchBucket", "bucket does not exist", "ContainerNotFound", "container does not exist"))


def error_of(e: Exception, *, local: bool) -> type[ChannelUnreachable]:
    """Error class of a failure; see `channels.retrying`.

    Args:
        local: the store is a folder, where few errors are transient.
    """
    text = str(e)
    if local:
        return ChannelUnreachable if any(code in text for code in _PASSING_LOCALLY) else ChannelRefused
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if status in (429, 503) or "<Code>SlowDown</Code>" in text:
        return ChannelThrottled
    if status == 408 or any(f"<Code>{code}</Code>" in text for code in _PASSING_CLIENT_ERRORS):
        return ChannelUnreachable
    no_credentials = any(place in text for place in _CREDENTIAL_HOSTS)
    denied = isinstance(e, (PermissionDeniedError, UnauthenticatedError)) or is_missing_bucket(e) or no_credentials
    if denied or 400 <= status < 500 or "InvalidCertificate(" in text or "InvalidContentType" in text:
        return ChannelRefused
    return ChannelUnreachable


def is_conflict(e: Exception) -> bool:
    """Whether a create-only put met a concurrent one (409), which does not mean that the key is taken."""
    return "status code: 409" in str(e)


def explain(e: Exception) -> str:
    """Problem and remedy in one line, without query strings, which may hold signatures."""
    text = str(e)
    if is_missing_bucket(e):
        return "the bucket does not exist or is not ours; create it, or check its name and the endpoint"
    if "No space left" in text or "StorageFull" in text:
        return "no space left on device; delete old runs or use another folder"
    if "Permission denied" in text or "Read-only file system" in text:
        return "permission denied; check who owns the folder"
    if any(place in text for place in _CREDENTIAL_HOSTS):
        return "no credentials found; set the cloud's usual environment variables, for example AWS_ACCESS_KEY_ID"
    if isinstance(e, (PermissionDeniedError, UnauthenticatedError)) or "403 Forbidden" in text or "401 Un" in text:
        return f"permission denied{_code(text)}; check the credentials and what they may do there"
    if "InvalidCertificate(" in text:
        return _unverified(text.partition("InvalidCertificate(")[2])
    if "InvalidContentType" in text:
        return "what answers there does not speak TLS; write http:// in AWS_ENDPOINT_URL_S3, or give its TLS port"
    if "kind: Connect" in text:
        return "cannot connect (refused, or no such host); check that the endpoint is right and its server runs"
    if "kind: Timeout" in text:
        return "no answer in time; check the endpoint and the network"
    first = text.strip().partition("\n")[0]
    return re.sub(r"\?\S+", "", first.partition("<?xml")[0])[:200].rstrip(" :") + _code(text)


def _unverified(reason: str) -> str:
    """Why rustls refuses a certificate. obstore reads its authorities from SSL_CERT_FILE."""
    if reason.lstrip().startswith("Expired"):
        return "its certificate has expired; renew it on the server, or set this machine's clock"
    if reason.lstrip().startswith("NotValidForName"):
        return "its certificate is for another host; use the host name that the certificate has"
    kind = reason.split(maxsplit=1)[0].strip("(),{")
    return f"its certificate is not signed by an authority that is trusted here ({kind}); set SSL_CERT_FILE to the authority's PEM file"


def _code(text: str) -> str:
    found = re.search(r"<Code>(.*?)</Code>", text)
    return f" ({found[1]})" if found else ""
