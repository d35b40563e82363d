"""Sends calls to Lambda: said before it is done, through the store where too large, patient where throttled.

The same for a client and for a function that invokes its successor.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

from ephemeron.channels.base import Channel
from ephemeron.errors import InvocationRefused
from ephemeron.platforms.aws.records import Envelope, Names, Record, new_id, sending
from ephemeron.platforms.aws.settings import THROTTLED, UNANSWERED, AwsSettings, code_of, explain
from ephemeron.platforms.base import Call

INLINE_BYTES = 1_000_000
"""Largest event that is sent itself. AWS allows 1 MB (1,048,576 bytes) since October 2025, 256 KB before."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, TRIES = 0.2, 8.0, 8

Announce: TypeAlias = Callable[[Record], Awaitable[None]]


def pauses(rng: random.Random) -> Iterator[float]:
    """Seconds between tries: drawn evenly below a bound that doubles ("full jitter"), so that many senders spread."""
    bound = FIRST_PAUSE_S
    for _ in range(TRIES - 1):
        yield rng.uniform(0.0, bound)
        bound = min(2 * bound, LONGEST_PAUSE_S)


class RecordedSender(ABC):
    """One voice's way of starting functions: a record first, then the request. Clouds differ in `request`.

    Args:
        channel: for calls that are too large; used in the loop that sends.
        names: of the records.
        announce: takes a record, and returns when it is in the store.
        every_s: how often functions are to report.
        by: the invocation that sends; empty for clients.
        clock: Unix time.
        inline_bytes: larger events go through the store.
    """

    def __init__(
        self, *, channel: Channel, names: Names, announce: Announce, every_s: float, by: str = "",
        clock: Callable[[], float] = time.time, inline_bytes: int = INLINE_BYTES,
    ) -> None:  # fmt: skip
        self._channel, self._names, self._announce, self._by = channel, names, announce, by
        self._every_s, self._clock, self._inline_bytes = every_s, clock, inline_bytes

    @abstractmethod
    async def request(self, event: bytes, call: Call) -> str:
        """Hands an event to the cloud, patiently; returns the request's id.

        Args:
            event: an `Envelope`; of a large call, without it.
            call: what it stands for.

        Raises:
            InvocationRefused: nothing was started.
        """

    async def send(self, call: Call, *, id: str | None = None, copies: int = 1) -> str:
        """Starts a function, and returns the call's id.

        Args:
            call: what it is told.
            id: from `records.new_id`; None: a new one.
            copies: how often it is sent, for tests of duplicates.

        Raises:
            InvocationRefused: Lambda refuses it, or goes on throttling.
            ChannelError: the store does not take the record; then nothing was sent.
        """
        id = id or new_id(call)
        await self._announce(sending(id, call, at=self._clock(), copies=copies, by=self._by))
        try:
            event = await self._event(id, call)
            for _ in range(copies):
                request = await self.request(event, call)
                await self._announce({"record": "sent", "id": id, "request": request})
        except InvocationRefused as e:
            await self._announce({"record": "unsent", "id": id, "error": str(e)})
            raise
        return id

    async def _event(self, id: str, call: Call) -> bytes:
        payload = call.to_payload()
        fields: dict[str, Any] = {
            "id": id, "run": call.run, "rank": call.rank, "attempt": call.attempt, "calls": self._names.calls,
            "channel": call.channel, "every_s": self._every_s, "lifetime_s": call.lifetime_s,
        }  # fmt: skip
        event = Envelope(**fields, call=payload).to_bytes()
        if len(event) <= self._inline_bytes:
            return event
        import json

        await self._channel.put(self._names.payload(id), [json.dumps(payload).encode()])
        return Envelope(**fields, call=None).to_bytes()


class Sender(RecordedSender):
    """Sends to AWS Lambda.

    Args:
        settings: which function.
        client: makes the boto3 client; called once, in a thread.
        rng: of the pauses.
        voice: see `RecordedSender`.
    """

    def __init__(
        self, settings: AwsSettings, client: Callable[[], Any], *, rng: random.Random | None = None, **voice: Any
    ) -> None:
        super().__init__(every_s=settings.every_s, **voice)
        self._settings, self._make_client, self._rng = settings, client, rng or random.Random()
        self._client: Any = None
        self._first = asyncio.Lock()

    async def request(self, event: bytes, call: Call) -> str:
        waits = pauses(self._rng)
        client = await self._known_client()
        while True:
            try:
                answer = await asyncio.to_thread(
                    client.invoke, FunctionName=self._settings.function, InvocationType="Event", Payload=event
                )
                return str(answer["ResponseMetadata"]["RequestId"])
            except Exception as e:
                # A request that was heard although nobody answered starts the call twice, which does no harm.
                pause = next(waits, None) if code_of(e) in THROTTLED | UNANSWERED else None
                if pause is None:
                    problem, remedy = explain(e, self._settings, doing="lambda:InvokeFunction")
                    binding = "concurrency" if code_of(e) in THROTTLED else "authorisation"
                    raise InvocationRefused(f"{problem}; {remedy}", binding=binding) from e
            await asyncio.sleep(pause)

    async def _known_client(self) -> Any:
        async with self._first:
            if self._client is None:
                self._client = await asyncio.to_thread(self._make_client)
        return self._client
