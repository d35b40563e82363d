"""Reporting of one delivery: a thread that writes records, checks for cancellation and enforces the time limit.

It has an event loop of its own: if user code blocks the worker's loop, emitted events still reach the store, and a call
that is cancelled or over its time limit still ends. (Code that never releases the interpreter lock stops this thread, too;
the cloud's own time limit remains.)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.retrying import Retrying, RetryPolicy
from ephemeron.communication.channels.wrappers import Metered
from ephemeron.communication.signing import SigningKey
from ephemeron.config.own_processes import peak_mb
from ephemeron.errors import ChannelError, ChannelUnreachable, KeyExists
from ephemeron.events import Status, Traffic
from ephemeron.functions.async_invoke.records import (
    EVERYTHING,
    BegunRecord,
    HandlerOutcome,
    InvokeRequest,
    OutcomeRecord,
    Record,
    RecordKeys,
    cancelled_ids,
    decode,
    encode,
    invocation_of,
    line_of,
    record_of,
)
from ephemeron.functions.base import Call

_log = logging.getLogger(__name__)

_START_S = 60.0
_CLOSE_S = 30.0
_LAST_WORD_S = 5.0
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySource:
    """Origin of a delivery, for its `BegunRecord`."""

    request: str
    """Id that the cloud gave the call."""
    stream: str = ""
    """Log stream; empty: none."""
    billed_by: str = ""
    """Party that measures the bill, if not the cloud."""
    billing_step_s: float = 0.001
    """Multiple of seconds to which a measured bill is rounded up."""


class InvocationReporter:
    """Reports for one delivery of one call.

    Args:
        envelope: the delivered request.
        open_channel: makes this thread's own connection; called in the thread.
        source: of the delivery.
        lifetime_s: from now; then the process ends.
        leave: ends the process; for tests.
    """

    def __init__(
        self,
        envelope: InvokeRequest,
        open_channel: Callable[[], Channel],
        source: DeliverySource,
        *,
        lifetime_s: float,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self.delivery = 0
        self._policy, self._rng = RetryPolicy(), random.Random(envelope.id)
        self._envelope, self._open_channel, self._source = envelope, open_channel, source
        self._names = RecordKeys(envelope.calls)
        self._leave = leave
        self._began = time.monotonic()
        self._deadline = self._began + lifetime_s
        self._lifetime_s = lifetime_s
        self._pending: deque[str] = deque()
        self._waiting: deque[Future[None]] = deque()
        """Resolved when everything so far is in the store."""
        self._number = 1
        self._urgent = threading.Event()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._begun: Future[Call] = Future()
        self._channel: Metered | None = None
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def start(self) -> Call:
        """Reports that the call has begun; returns it.

        Raises:
            ChannelError: the store does not answer.
            JobError: the store holds something else than the call.
        SignatureRefused: the call in the store is not the one that was sent.
        """
        self._thread.start()
        return self._begun.result(_START_S)

    @property
    def name(self) -> str:
        """Name of this delivery in events."""
        return invocation_of(self._envelope.id, self.delivery)

    @property
    def took_s(self) -> float:
        """Seconds since the handler was called."""
        return time.monotonic() - self._began

    @property
    def traffic(self) -> Traffic:
        """Channel operations of the reporter so far."""
        return Traffic() if self._channel is None else self._channel.traffic

    def say(self, line: str) -> None:
        """Adds a line, which is put with the next report. Any thread; never blocks, never fails."""
        self._pending.append(line)

    async def announce(self, record: Record) -> None:
        """Adds a record, and returns when it is in the store. A record that cannot be put is put with the next try.

        Raises:
            ChannelError: the store has not taken it for as long as requests are repeated.
        """
        loop = asyncio.get_running_loop()
        self.say(line_of(record))
        tries, first = 0, 0.0
        while True:
            try:
                return await asyncio.wrap_future(self._flushed())
            except ChannelUnreachable as e:
                tries, first = tries + 1, first or loop.time()
                pause_s = self._policy.pause_s(e, tries=tries, failing_s=loop.time() - first, rng=self._rng)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    def flush(self, limit_s: float = _LAST_WORD_S) -> None:
        """Waits, with a limit, until all lines are in the store."""
        with contextlib.suppress(TimeoutError, ChannelError):
            self._flushed().result(limit_s)

    def close(self, outcome: HandlerOutcome) -> None:
        """Reports the end; returns when it is in the store, or cannot be put there."""
        self._closing = True  # from here on neither the time limit nor a cancellation ends the process
        self._say_outcome(outcome)
        end = time.monotonic() + _CLOSE_S
        while self._thread.is_alive() and time.monotonic() < end:
            try:
                self._flushed().result(end - time.monotonic())
                break
            except (TimeoutError, ChannelError):
                pass  # it is tried again
        self._stop()
        self._thread.join(_CLOSE_S)

    def _say_outcome(self, outcome: HandlerOutcome) -> None:
        record = OutcomeRecord(
            id=self._envelope.id,
            delivery=self.delivery,
            status=outcome.status,
            error=outcome.error,
            value=outcome.value,
            took_s=outcome.took_s,
            peak_mb=outcome.peak_mb,
            burst_vcpu_s=outcome.burst_vcpu_s,
            traffic=self.traffic,
        )
        self.say(line_of(record))

    def _stop(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._main.cancel)

    def _flushed(self) -> Future[None]:
        done: Future[None] = Future()
        self._waiting.append(done)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._wake.set)
        return done

    # -- in the thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._main = task
        try:
            async with self._open_channel() as channel:
                self._channel = Metered(channel)
                # Later requests are not repeated here: reports go with the next ones, and the time limit is checked meanwhile.
                steady = Retrying(self._channel, policy=RetryPolicy(total_s=0.75 * _START_S), rng=self._rng)
                if EVERYTHING in await self._cancelled(steady):
                    self._leave(1)  # delivered again after the end of the run: nothing is reported
                await self._begin(steady)
                call = await self._call(steady)
                if await self._is_cancelled(steady):
                    await self._end(self._channel, "cancelled", "cancelled before it began")
                self._begun.set_result(call)
                await self._report(self._channel)
        except Exception as e:
            if self._begun.done():
                raise
            self._begun.set_exception(e)

    async def _begin(self, channel: Channel) -> None:
        """Takes the first free number: a second delivery of the same call gets another one."""
        mark = secrets.token_hex(8)
        while True:
            record = BegunRecord(
                id=self._envelope.id,
                delivery=self.delivery,
                request=self._source.request,
                stream=self._source.stream,
                billed_by=self._source.billed_by,
                billing_step_s=self._source.billing_step_s,
                at=round(time.time(), 3),
                mark=mark,
            )
            key = self._names.segment(self._envelope.id, self.delivery, 0)
            try:
                await channel.put(key, [encode([line_of(record)])], create=True)
                return
            except KeyExists:
                there = await channel.fetch(key)
                first = None if there is None else record_of(decode(there)[0])
                if isinstance(first, BegunRecord) and first.mark == mark:
                    return  # its own: the answer to an earlier try was lost
                _log.info("delivery %d of the call exists; this is another one", self.delivery)
                self.delivery += 1

    async def _call(self, channel: Channel) -> Call:
        if self._envelope.call is not None:
            return self._envelope.call
        deadline = asyncio.get_running_loop().time() + _START_S
        place, key = self._names.payload(self._envelope.id), self._envelope.key
        data = (await channel.get(place, deadline=deadline)).data
        stored = SigningKey.from_text(key).verified(data, name=place)
        return replace(Call.from_payload(json.loads(bytes(stored))), key=key)

    async def _report(self, channel: Channel) -> None:
        every_s = self._envelope.every_s
        look_at = time.monotonic() + every_s
        while True:
            left = min(look_at, self._deadline) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, left))
            self._wake.clear()
            await self._flush(channel)
            now = time.monotonic()
            if now >= look_at:
                look_at = now + every_s
                if not self._closing and await self._is_cancelled(channel) and not self._closing:
                    await self._end(channel, "cancelled", "cancelled")
            if now >= self._deadline and not self._closing:
                text = f"killed at its lifetime limit of {self._lifetime_s:g} s"
                await self._end(channel, "timed_out", text)

    async def _flush(self, channel: Channel) -> None:
        """Puts the pending lines as one object; lines that cannot be put stay pending."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        lines = [self._pending.popleft() for _ in range(len(self._pending))]
        try:
            if lines:
                key = self._names.segment(self._envelope.id, self.delivery, self._number)
                await channel.put(key, [encode(lines)])
                self._number += 1
        except ChannelError as e:
            self._pending.extendleft(reversed(lines))
            for done in waiting:
                if not done.done():
                    done.set_exception(e)
            _log.warning("cannot report: %s", e)
            await asyncio.sleep(_PAUSE_S)
            return
        for done in waiting:
            if not done.done():
                done.set_result(None)

    async def _is_cancelled(self, channel: Channel) -> bool:
        try:
            return not {self._envelope.id, EVERYTHING}.isdisjoint(await self._cancelled(channel))
        except ChannelError:
            return False

    async def _cancelled(self, channel: Channel) -> frozenset[str]:
        return cancelled_ids(await channel.fetch(self._names.cancel))

    async def _end(self, channel: Channel, status: Status, error: str) -> None:
        """Ends the process, after a last report that may fail but not hang."""
        _log.info("the call ends: %s", error)
        self._say_outcome(HandlerOutcome(status=status, error=error, took_s=self.took_s, peak_mb=peak_mb()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                await self._flush(channel)
        sys.stdout.write(f"ephemeron: {error}\n")
        sys.stdout.flush()
        self._leave(1)
