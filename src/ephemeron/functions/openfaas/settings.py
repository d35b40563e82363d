"""Settings of the function behind a gateway, and the credentials of the gateway."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.sizes import function_of

FUNCTION = "ephemeron"
GATEWAY = "http://127.0.0.1:8080"
"""Usual address of `kubectl port-forward`."""
INSIDE = "http://gateway.openfaas.svc.cluster.local:8080"
"""The gateway, as functions reach it in the usual cluster."""
GATEWAY_ENV, USER_ENV, PASSWORD_ENV = "OPENFAAS_URL", "EPHEMERON_OPENFAAS_USER", "EPHEMERON_OPENFAAS_PASSWORD"
"""The first one is what `faas-cli` reads, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFaasSettings:
    """Location of the function. Without secrets."""

    gateway: str = ""
    """URL; empty: OPENFAAS_URL, or the usual port of this machine."""
    function: str = FUNCTION
    """Name of the deployment: of its first function."""
    sizes_mb: tuple[int, ...] = ()
    """Memory sizes that are deployed, the first is that of `function`; empty: not asked, or that one alone."""
    lifetime_s: float = 0.0
    """Time limit with which it is deployed; 0: not asked."""
    namespace: str = ""
    """Empty: the gateway's default."""
    every_s: float = 5.0
    """Seconds between reports of functions, and between rounds of the collector."""
    callback: str = ""
    """URL of this machine, `http://HOST:PORT`, at which the queue-worker reaches it; empty: deaths of whole replicas are
    noticed by silence."""

    def located(self) -> OpenFaasSettings:
        """The settings with their gateway filled in.

        Raises:
            JobError: one of the values is not a URL.
        """
        gateway = (self.gateway or os.environ.get(GATEWAY_ENV) or GATEWAY).rstrip("/")
        check_url(gateway, "--openfaas-gateway")
        if self.callback:
            check_url(self.callback, "--openfaas-callback")
            if urlsplit(self.callback).port is None:
                raise JobError(f"--openfaas-callback {self.callback!r} has no port", remedy="give http://HOST:PORT")
        return dataclasses.replace(self, gateway=gateway, callback=self.callback.rstrip("/"))

    def of_size(self, memory_mb: int) -> OpenFaasSettings:
        """The settings with the function of a memory size as the only one."""
        return dataclasses.replace(self, function=function_of(self.function, self.sizes_mb, memory_mb), sizes_mb=())

    @property
    def path_name(self) -> str:
        """The function, as paths name it."""
        return f"{self.function}.{self.namespace}" if self.namespace else self.function


@dataclass(frozen=True, slots=True)
class Credentials:
    """Basic authentication at the gateway. Never printed, written or sent elsewhere."""

    user: str
    password: str = dataclasses.field(repr=False)


def credentials() -> Credentials | None:
    """From EPHEMERON_OPENFAAS_USER (`admin`) and EPHEMERON_OPENFAAS_PASSWORD; `@FILE` reads it from a file.

    Returns:
        None where no password is set: a gateway may do without.

    Raises:
        JobError: the file cannot be read.
    """
    password = os.environ.get(PASSWORD_ENV, "")
    if not password:
        return None
    if password.startswith("@"):
        try:
            password = Path(password[1:]).read_text().strip()
        except OSError as e:
            raise JobError(f"{PASSWORD_ENV} names a file that cannot be read: {password[1:]}: {e.strerror}") from None
    return Credentials(os.environ.get(USER_ENV, "admin"), password)


def check_url(url: str, where: str) -> None:
    """Raises `JobError` unless it is an HTTP URL without credentials."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise JobError(f"{where} {url!r} is no URL", remedy="give http://HOST:PORT")
    if parts.username or parts.password:
        raise JobError(f"credentials do not belong in {where}", remedy=f"set {PASSWORD_ENV} instead")
    if parts.query or parts.fragment:
        raise JobError(f"{where} {url!r} has more than a path", remedy="give http://HOST:PORT")
