"""Log source for machines that the queue-worker can reach: it reports deaths that no handler can report.

The queue-worker posts to X-Callback-Url when a call has ended, or has been given up: X-Call-Id, X-Function-Status,
X-Duration-Seconds. 2xx adds nothing to the store; after any other status there may be no
outcome in the store. The path contains a random token of the listener, so that no other sender can report deaths.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from ephemeron.communication.rpc.http import HttpRequest, Listener, Response, listen
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.openfaas.settings import OpenFaasSettings

NOT_RUN = frozenset({429, 503})
"""Busy, or no replica: the call has not been run."""
_SAID = 200
_MAX_BODY = 8 << 20
"""Bytes of a call-back: of a function's answer, which is an outcome."""


class Callbacks:
    """A listener for one client, and a log source. `open` starts it.

    Args:
        settings: `callback` is where the queue-worker finds it.
    """

    def __init__(self, settings: OpenFaasSettings) -> None:
        self.problem = ""
        self._base = settings.callback
        self._token = secrets.token_urlsafe(16)
        self._heard: list[LogReport | Death] = []
        self._listener: Listener | None = None

    @property
    def url(self) -> str:
        """Value of X-Callback-Url."""
        return f"{self._base}/{self._token}"

    async def open(self) -> None:
        """Begins to listen: on loopback if that is where the URL points, else on all addresses; port 0: a free one.

        Raises:
            OSError: the port is taken.
        """
        parts = urlsplit(self._base)
        here = parts.hostname in ("127.0.0.1", "localhost", "::1")
        host = "127.0.0.1" if here else "0.0.0.0"
        self._listener = await listen(self._answer, host=host, port=parts.port or 0, max_body=_MAX_BODY)
        if parts.port == 0:
            self._base = f"{parts.scheme}://{parts.hostname}:{self._listener.port}"

    async def close(self) -> None:
        """Ends listening."""
        if self._listener is not None:
            await self._listener.close()

    async def poll(self) -> list[LogReport | Death]:
        """New reports and deaths."""
        heard, self._heard = self._heard, []
        return heard

    async def tail(self, stream: str, request: str) -> list[str]:
        """None: the cluster keeps the functions' output (`faas-cli logs`)."""
        return []

    async def _answer(self, request: HttpRequest) -> Response:
        if request.path.strip("/").rpartition("/")[2] != self._token:
            return Response(status=404)
        self._heard += reports_of(request.headers, request.body)
        return Response()


def reports_of(headers: Mapping[str, str], body: bytes) -> list[LogReport | Death]:
    """Reports of a call-back; none if the call ended well, or if it is not a call-back.

    Args:
        headers: names in lower case.
        body: answer of the function, or of the gateway in its place.
    """
    try:
        request, status = headers["x-call-id"], int(headers["x-function-status"])
        seconds = float(headers.get("x-duration-seconds", "0"))
    except (KeyError, ValueError):
        return []
    if 200 <= status < 300 or not math.isfinite(seconds):
        return []
    said = " ".join(body.decode(errors="replace").split())[:_SAID]
    text = f"the gateway answered {status}" + (f": {said}" if said else "")
    if status in NOT_RUN:
        text = f"no replica was free, and the queue gave up ({status}): let it retry, or deploy more replicas"
    # Seconds from the queue: an upper bound of what it cost, and the only figure for a replica that is gone.
    report = LogReport(request=request, stream="", billed_s=math.ceil(seconds * 1000) / 1000, size_mb=1.0, used_mb=0.0)
    if status in NOT_RUN:
        return [Death(request=request, stream="", timed_out=False, text=text)]
    return [report, Death(request=request, stream="", timed_out=status == 504, text=text)]
