"""Sender of calls to Lambda, with retries. The same for a client and for a function that invokes its successor."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from ephemeron.errors import InvocationRefused
from ephemeron.functions.async_invoke.invoker import RecordedSender, pauses
from ephemeron.functions.aws.settings import THROTTLED, UNANSWERED, AwsSettings, code_of, explain
from ephemeron.functions.base import Call

_log = logging.getLogger(__name__)

INLINE_BYTES = 1_000_000
"""Largest event that is sent itself. AWS allows 1 MB (1,048,576 bytes) since October 2025, 256 KB before."""


class Sender(RecordedSender):
    """Sends to AWS Lambda.

    Args:
        settings: of the function.
        client: makes the boto3 client; called once, in a thread.
        rng: of the pauses.
        inline_bytes: larger events go through the store.
        sender: further arguments of `RecordedSender`.
    """

    def __init__(
        self,
        settings: AwsSettings,
        client: Callable[[], Any],
        *,
        rng: random.Random | None = None,
        inline_bytes: int = INLINE_BYTES,
        **sender: Any,
    ) -> None:
        super().__init__(every_s=settings.every_s, inline_bytes=inline_bytes, **sender)
        self._settings, self._make_client, self._rng = settings, client, rng or random.Random()
        self._client: Any = None
        self._first = asyncio.Lock()

    async def request(self, event: bytes, call: Call) -> str:
        waits, name = pauses(self._rng), self._settings.function_of(call.memory_mb)
        client = await self._known_client()
        version = {"Qualifier": self._settings.qualifier} if self._settings.qualifier else {}
        while True:
            try:
                answer = await asyncio.to_thread(client.invoke, FunctionName=name, InvocationType="Event", Payload=event, **version)
                return str(answer["ResponseMetadata"]["RequestId"])
            except Exception as e:
                # A request that was served although its answer was lost starts the call twice, which is harmless.
                pause = next(waits, None) if code_of(e) in THROTTLED | UNANSWERED else None
                if pause is None:
                    problem, remedy = explain(e, self._settings, doing="lambda:InvokeFunction")
                    binding = "concurrency" if code_of(e) in THROTTLED else "authorisation"
                    raise InvocationRefused(f"{problem}; {remedy}", binding=binding) from e
            _log.info("the request to start a function is repeated in %.1f s", pause)
            await asyncio.sleep(pause)

    async def _known_client(self) -> Any:
        async with self._first:
            if self._client is None:
                self._client = await asyncio.to_thread(self._make_client)
        return self._client
