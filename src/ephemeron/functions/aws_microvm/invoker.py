"""Sender of calls: one MicroVM each. The same for a client and for a supervisor that invokes a successor."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ephemeron.errors import InvocationRefused
from ephemeron.functions.async_invoke.invoker import RecordedSender, pauses
from ephemeron.functions.aws.settings import THROTTLED, UNANSWERED, code_of
from ephemeron.functions.aws_microvm.api import LaunchSpec, MicrovmApi
from ephemeron.functions.aws_microvm.payload import PAYLOAD_BYTES, RunPayload
from ephemeron.functions.aws_microvm.settings import AwsMicrovmSettings, explain
from ephemeron.functions.base import Call

_log = logging.getLogger(__name__)

AGAIN = THROTTLED | UNANSWERED | {"InternalServerException", "InsufficientCapacityException"}
"""Errors after which the same request may succeed."""


class MicrovmSender(RecordedSender):
    """Starts MicroVMs of one deployment.

    Args:
        settings: for messages.
        api: makes the client; called once.
        launch: what MicroVMs are started with.
        secrets: variables of functions, in their payload only.
        rng: of the pauses.
        sender: further arguments of `RecordedSender`.
    """

    def __init__(
        self,
        settings: AwsMicrovmSettings,
        api: Callable[[], Awaitable[MicrovmApi]],
        launch: LaunchSpec,
        secrets: Mapping[str, str],
        *,
        rng: random.Random | None = None,
        **sender: Any,
    ) -> None:
        around = len(RunPayload(request={}, launch=launch, variables=secrets).to_text().encode())
        super().__init__(inline_bytes=PAYLOAD_BYTES - around, **sender)
        self._settings, self._make_api, self._launch, self._secrets = settings, api, launch, secrets
        self._rng = rng or random.Random()
        self._api: MicrovmApi | None = None
        self._first = asyncio.Lock()
        self._copies: Counter[str] = Counter()

    async def request(self, event: bytes, call: Call) -> str:
        request = json.loads(event)
        payload = RunPayload(request=request, launch=self._launch, variables=self._secrets).to_text()
        # A repeated request has the token of the first one, and starts nothing twice; a wanted copy has another one.
        id = str(request["id"])
        token = f"{call.run}-{id}-{self._copies[id]}"[-128:]
        self._copies[id] += 1
        waits = pauses(self._rng)
        while True:
            try:
                api = await self._known_api()
                return await api.run(self._launch, call.memory_mb, payload=payload, token=token)
            except Exception as e:
                pause = next(waits, None) if code_of(e) in AGAIN else None
                if pause is None:
                    problem, remedy = explain(e, self._settings, doing="lambda:RunMicrovm")
                    full = code_of(e) in THROTTLED | {"ServiceQuotaExceededException", "InsufficientCapacityException"}
                    raise InvocationRefused(f"{problem}; {remedy}", binding="concurrency" if full else "authorisation") from e
            _log.info("the request to start a MicroVM is repeated in %.1f s", pause)
            await asyncio.sleep(pause)

    async def _known_api(self) -> MicrovmApi:
        async with self._first:
            if self._api is None:
                self._api = await self._make_api()
        return self._api
