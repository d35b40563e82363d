"""Platform of OpenFaaS: one client's access to the calls of one run, and call-backs of the queue-worker, which tell it of deaths."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.rpc.http import HttpRequest, Listener, Response, listen
from ephemeron.errors import JobError
from ephemeron.functions.async_invoke.log_source import Death, LogReport
from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
from ephemeron.functions.async_invoke.records import RecordKeys, calls_prefix
from ephemeron.functions.base import Limits
from ephemeron.functions.openfaas.gateway import Gateway
from ephemeron.functions.openfaas.invoker import GatewaySender
from ephemeron.functions.openfaas.settings import OpenFaasSettings

LIMITS = Limits(memory_max_mb=262_144, lifetime_s=86_400.0, payload_bytes=16_000_000, mb_per_vcpu=1769.0, concurrency=1_000)
"""A cluster has none of its own: these only keep mistakes out. Calls of more than 128 kB go through the store."""


class OpenFaasPlatform(AsyncInvokePlatform):
    """Functions of one run on OpenFaaS. Made by `open`.

    Args:
        run_dir: folder of the run, for `events.jsonl` and `calls.jsonl`.
        settings: which function; located.
        limits: what it allows; its memory is what every call has to ask for.
        channel: of the run, by a connection of the platform's own, which the platform closes.
        names: of the records.
        callbacks: listener for the ends of calls; None: there is none.
    """

    name = "openfaas"

    def __init__(
        self,
        run_dir: Path,
        settings: OpenFaasSettings,
        limits: Limits,
        channel: Channel,
        names: RecordKeys,
        *,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.settings, self._callbacks = settings, callbacks
        self.unenforced = (
            f"A cancelled function ends when its handler looks, every {settings.every_s:g} s.",
            *(
                ()
                if callbacks is not None
                else ("The death of a whole replica is noticed by its silence, after its lifetime; give a call-back URL to know at once.",)
            ),
        )
        super().__init__(run_dir, limits, channel, names, every_s=settings.every_s)

    def sender(self) -> GatewaySender:
        return GatewaySender(
            Gateway(self.settings),
            callback="" if self._callbacks is None else self._callbacks.url,
            channel=self._channel,
            names=self._names,
            announce=self._announce,
            every_s=self._every_s,
        )

    @classmethod
    async def open(cls, run_dir: Path, settings: OpenFaasSettings, *, channel: str, run: str, limits: Limits = LIMITS) -> OpenFaasPlatform:
        """Opens the calls of a run, earlier ones included.

        Args:
            run_dir: made when missing.
            settings: which function, and where the queue-worker reaches this machine, if it does.
            channel: address of the run's channel.
            run: its name, which the names of the records begin with.
            limits: see `preflight.inspect`.

        Raises:
            JobError: no URL, no channel at that address, or the port of the call-back is taken.
            MissingExtra: a library of the channel is absent.
        """
        settings = settings.located()
        run_dir.mkdir(parents=True, exist_ok=True)
        callbacks = Callbacks(settings) if settings.callback else None
        if callbacks is not None:
            try:
                await callbacks.open()
            except OSError as e:
                raise JobError(f"cannot listen for call-backs at {settings.callback}: {e.strerror}", remedy="give another port") from None
        self = cls(run_dir, settings, limits, open_channel(channel), RecordKeys(calls_prefix(run)), callbacks=callbacks)
        if callbacks is not None:
            self._stack.push_async_callback(callbacks.close)
        try:
            await self.hold(channel, callbacks)
        except BaseException:
            await self.close()
            raise
        return self


NOT_RUN = frozenset({429, 503})
"""Busy, or no replica: the call has not been run."""
_SAID = 200
_MAX_BODY = 8 << 20
"""Bytes of a call-back: of a function's answer, which is an outcome."""


class Callbacks:
    """A listener for one client and a log source, on machines that the queue-worker can reach: it reports deaths that no handler can report.

    The queue-worker posts to X-Callback-Url when a call has ended, or has been given up: X-Call-Id, X-Function-Status,
    X-Duration-Seconds. 2xx adds nothing to the store; after any other status there may be no
    outcome in the store. The path contains a random token of the listener, so that no other sender can report deaths.
    `open` starts it.

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
        self._heard += parse_callback(request.headers, request.body)
        return Response()


def parse_callback(headers: Mapping[str, str], body: bytes) -> list[LogReport | Death]:
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
