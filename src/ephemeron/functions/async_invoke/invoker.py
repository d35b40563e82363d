"""Sends calls: a record before each request, and large calls through the store.

The same for a client and for a function that invokes its successor.
"""

from __future__ import annotations

import json
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.retrying import Retrying, RetryPolicy
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import InvocationRefused
from ephemeron.functions.async_invoke.records import InvokeRequest, Record, RecordKeys, SendingRecord, SentRecord, UnsentRecord, new_id
from ephemeron.functions.base import Call
from ephemeron.functions.entries import check_entry, known

FIRST_PAUSE_S, LONGEST_PAUSE_S, TRIES = 0.2, 8.0, 8

Announce: TypeAlias = Callable[[Record], Awaitable[None]]

_log = logging.getLogger(__name__)


def pauses(rng: random.Random) -> Iterator[float]:
    """Seconds between tries, drawn uniformly below a bound that doubles ("full jitter"), so that many senders spread."""
    bound = FIRST_PAUSE_S
    for _ in range(TRIES - 1):
        yield rng.uniform(0.0, bound)
        bound = min(2 * bound, LONGEST_PAUSE_S)


class RecordedSender(ABC):
    """Sends the calls of one writer: a record first, then the request. Clouds differ in `request`.

    Args:
        channel: for calls that are too large; used in the loop that sends.
        names: of the records.
        announce: takes a record, and returns when it is in the store.
        every_s: seconds between reports of functions.
        by: invocation that sends; empty: a client.
        clock: Unix time.
        inline_bytes: larger events go through the store.
        variables: environment variables of the functions, which may add entries; None: this process has them.
    """

    def __init__(
        self,
        *,
        channel: Channel,
        names: RecordKeys,
        announce: Announce,
        every_s: float,
        by: str = "",
        clock: Callable[[], float] = time.time,
        inline_bytes: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._channel = Retrying(channel, policy=RetryPolicy(), rng=random.Random(f"{names.calls}/{by}"))
        self._names, self._announce, self._by = names, announce, by
        self._every_s, self._clock, self._inline_bytes = every_s, clock, inline_bytes
        self._variables = variables

    @abstractmethod
    async def request(self, event: bytes, call: Call) -> str:
        """Sends an event to the cloud, with retries; returns the request's id.

        Args:
            event: an `InvokeRequest`, without the call if that is large.
            call: the call.

        Raises:
            InvocationRefused: no function was started.
        """

    async def send(self, call: Call, *, id: str | None = None, copies: int = 1) -> str:
        """Starts a function, and returns the call's id.

        Args:
            call: the call.
            id: from `records.new_id`; None: a new one.
            copies: times that it is sent, for tests of duplicates.

        Raises:
            InvocationRefused: the cloud refuses it, or goes on throttling; or there is no such entry.
            ChannelError: the store does not take the record; then nothing was sent.
        """
        check_entry(call.entry, known(self._variables))
        id = id or new_id(call)
        await self._announce(SendingRecord.of(id, call, at=self._clock(), copies=copies, by=self._by))
        try:
            event = await self._event(id, call)
            for _ in range(copies):
                request = await self.request(event, call)
                await self._announce(SentRecord(id=id, request=request))
        except InvocationRefused as e:
            _log.warning("call %s is refused: %s", id, e)
            await self._announce(UnsentRecord(id=id, error=str(e)))
            raise
        _log.info("call %s is sent", id)
        return id

    async def _event(self, id: str, call: Call) -> bytes:
        request = InvokeRequest(
            id=id,
            run=call.run,
            rank=call.rank,
            attempt=call.attempt,
            calls=self._names.calls,
            channel=call.channel,
            every_s=self._every_s,
            lifetime_s=call.lifetime_s,
            call=call,
        )
        event = request.to_bytes()
        if len(event) <= self._inline_bytes:
            return event
        place = self._names.payload(id)
        stored = json.dumps(replace(call, key="").to_payload()).encode()
        await self._channel.put(place, SigningKey.from_text(call.key).signed([stored], name=place))
        return replace(request, call=None, key=call.key).to_bytes()
