"""Sender of calls through the gateway's queue. The same for a client and for a function that invokes its successor."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from ephemeron.errors import GatewayError, InvocationRefused
from ephemeron.functions.async_invoke.invoker import RecordedSender, pauses
from ephemeron.functions.base import Call
from ephemeron.functions.openfaas.gateway import THROTTLED, UNREACHABLE, Gateway, explain

_log = logging.getLogger(__name__)

INLINE_BYTES = 128_000
"""Largest call that is sent itself. Queues take 1 MB, the Community Edition's 256 KB; a call's base64 makes it a third larger."""


class GatewaySender(RecordedSender):
    """Sends to the functions of one deployment.

    Args:
        gateway: as this sender reaches it.
        callback: URL that is notified of the ends of calls; empty: none.
        rng: of the pauses.
        sender: further arguments of `RecordedSender`.
    """

    def __init__(self, gateway: Gateway, *, callback: str = "", rng: random.Random | None = None, **sender: Any) -> None:
        super().__init__(inline_bytes=INLINE_BYTES, **sender)
        self._gateway, self._callback, self._rng = gateway, callback, rng or random.Random()

    async def request(self, event: bytes, call: Call) -> str:
        waits = pauses(self._rng)
        while True:
            try:
                return await asyncio.to_thread(self._gateway.invoke_async, event, callback=self._callback, memory_mb=call.memory_mb)
            except GatewayError as e:
                # A request that was served although its answer was lost starts the call twice, which is harmless.
                pause = next(waits, None) if e.status in THROTTLED or e.status == UNREACHABLE else None
                if pause is None:
                    problem, remedy = explain(e, self._gateway.settings, doing="calling")
                    binding = "concurrency" if e.status == 429 else ""
                    raise InvocationRefused(f"{problem}; {remedy}", binding=binding) from e
            _log.info("the request to start a function is repeated in %.1f s", pause)
            await asyncio.sleep(pause)
