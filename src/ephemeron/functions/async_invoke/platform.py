"""Platform without synchronous results: a client follows the records of its run's calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from ephemeron.communication.channels.address import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.retrying import Retrying, RetryPolicy
from ephemeron.errors import ChannelError, InvocationRefused, PlatformError
from ephemeron.events import Event, to_json
from ephemeron.functions.async_invoke.call_tracker import CallTracker
from ephemeron.functions.async_invoke.collector import CALLS_FILE, CLIENT, EVENTS_FILE, Collector, collecting
from ephemeron.functions.async_invoke.invoker import RecordedSender
from ephemeron.functions.async_invoke.log_source import LogSource
from ephemeron.functions.async_invoke.records import (
    EVERYTHING,
    FinalRecord,
    Record,
    RecordKeys,
    cancellation,
    cancelled_ids,
    encode,
    invocation_of,
    line_of,
    new_id,
    record_of,
)
from ephemeron.functions.base import Call, Invocation, Limits, Outcome, Platform
from ephemeron.functions.jsonl import Journal, follow
from ephemeron.functions.validation import check_call

_POLL_S = 0.05
_CANCEL_S = 60.0
_SWEEP_S = 10.0

_log = logging.getLogger(__name__)


class RecordedInvocation(Invocation):
    """A call that was sent."""

    def __init__(self, platform: AsyncInvokePlatform, id: str, call: Call) -> None:
        self.id = id
        self.call = call
        self._platform = platform

    async def wait(self) -> Outcome:
        """Waits until the records show that its first delivery has ended.

        Raises:
            PlatformError: the platform was closed meanwhile.
        """
        return await self._platform.outcome(self.id)

    async def cancel(self) -> None:
        """Flags the call as cancelled, which its function sees within seconds. Returns when it has ended."""
        await self._platform.cancel([self.id])


class AsyncInvokePlatform(Platform):
    """Functions of one run, followed by their records.

    Args:
        run_dir: folder of the run, for `events.jsonl`, `calls.jsonl` and `logs/`.
        limits: of the cloud.
        channel: of the run, by a connection of the platform's own, which the platform closes.
        names: of the records.
        every_s: seconds between reports of functions, and between rounds of the collector.
    """

    def __init__(self, run_dir: Path, limits: Limits, channel: Channel, names: RecordKeys, *, every_s: float) -> None:
        self.run_dir, self.limits = run_dir, limits
        self._journal = Journal(run_dir / EVENTS_FILE)
        self._known = CallTracker()
        """State by the records in `calls.jsonl`, which this or another process collects."""
        self._mine: set[str] = set()
        """Calls of this client without a record yet."""
        self._outcomes: dict[str, Outcome] = {}
        self._changed = asyncio.Condition()
        self._writer = f"{CLIENT}{secrets.token_hex(4)}"
        self._names, self._every_s = names, every_s
        self._channel: Channel = Retrying(channel, policy=RetryPolicy(), rng=random.Random(self._writer))
        self._number = 0
        self._offset = 0
        self._reopened = False
        self._telling = asyncio.Lock()
        self._collector: Collector | None = None
        self._stack = AsyncExitStack()
        self._closed = False
        self._stack.push_async_callback(channel.close)
        self._sender = self.sender()

    @abstractmethod
    def sender(self) -> RecordedSender:
        """This client's sender."""

    async def hold(self, channel: str, log_source: LogSource | None) -> None:
        """Starts to collect and to follow the records; returns when all present ones are known.

        Args:
            channel: address of the run's channel.
            log_source: a further log source.

        Raises:
            JobError: no channel at that address.
            MissingExtra: a library of the channel is absent.
        """
        own = await self._stack.enter_async_context(open_channel(channel))
        collector = Collector(self.run_dir, own, self._names, log_source, every_s=self._every_s)
        self._collector = await self._stack.enter_async_context(collecting(collector))
        await self._collector.looked.wait()
        await self._read_on()
        reading = asyncio.create_task(self._read())
        self._stack.callback(reading.cancel)

    async def invoke(self, call: Call) -> RecordedInvocation:
        check_call(call, self.limits)
        if len(self._open()) >= self.limits.concurrency:
            raise InvocationRefused(
                f"{len(self._open())} functions run already; the limit of concurrency is {self.limits.concurrency}", binding="concurrency"
            )
        twice, call = call.duplicate, dataclasses.replace(call, duplicate=False)
        id = new_id(call)
        self._mine.add(id)
        try:
            await self._reopen()
            await self._sender.send(call, id=id, copies=2 if twice else 1)
        except BaseException:
            self._mine.discard(id)
            raise
        if self._collector is not None:
            self._collector.hurry()
        return RecordedInvocation(self, id, call)

    def events(self, run: str) -> AsyncIterator[Event]:
        """All events in the run's folder."""
        return follow(self.run_dir / EVENTS_FILE)

    async def emit(self, run: str, event: Event) -> None:
        self._journal.append(to_json(event))
        if self._journal.problem:
            raise PlatformError(f"cannot write to {self.run_dir / EVENTS_FILE}: {self._journal.problem}")

    async def outcome(self, id: str) -> Outcome:
        """Outcome of a call's first delivery; waits for it.

        Raises:
            PlatformError: the platform was closed meanwhile.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: id in self._outcomes or self._closed)
        if id not in self._outcomes:
            raise PlatformError("this platform was closed")
        return self._outcomes[id]

    async def cancel(self, ids: list[str]) -> None:
        """Flags calls as cancelled, and waits until all have ended. Repeats the flag in case another client overwrites it."""
        _log.info("%d calls are cancelled", len(ids))
        end = asyncio.get_running_loop().time() + _CANCEL_S
        while (left := [id for id in ids if id in self._open()]) and not self._closed:
            flagged = cancelled_ids(await self._channel.fetch(self._names.cancel))
            if not flagged >= set(left):
                await self._channel.put(self._names.cancel, [cancellation(sorted(flagged | set(left)))])
            if self._collector is not None:
                self._collector.hurry()
            if asyncio.get_running_loop().time() > end:
                return  # a function that does not check; its time limit ends it
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, self._every_s)), self._changed:
                    await self._changed.wait()

    async def cancel_all(self, run: str) -> None:
        end = asyncio.get_running_loop().time() + _CANCEL_S
        while not self._closed and (left := sorted(self._open())) and asyncio.get_running_loop().time() < end:
            await self.cancel(left)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        async with self._changed:
            self._changed.notify_all()
        await self._stack.aclose()

    async def shutdown(self) -> None:
        """Ends all functions, clears what their records have left in the store, and detaches. Nothing once closed."""
        if self._closed:
            return
        try:
            async with asyncio.timeout(2 * _CANCEL_S):
                await self.cancel_all("")
            async with asyncio.timeout(_SWEEP_S):
                # The only object that stays: a cloud may deliver a call again after the end of the run.
                await self._channel.put(self._names.cancel, [cancellation([EVERYTHING])])
                left = await self._channel.list(self._names.all)
                await self._channel.delete([key for key in left if key != self._names.cancel])
        except (ChannelError, TimeoutError):
            pass  # the store cannot be reached: its objects are gone, or a lifecycle rule removes them
        finally:
            await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- records --------------------------------------------------------------------------------------------

    async def _announce(self, record: Record) -> None:
        """Puts a record of this client into the store, because another process may be the collector."""
        async with self._telling:
            key = self._names.segment(self._writer, 0, self._number)
            await self._channel.put(key, [encode([line_of(record)])])
            self._number += 1

    async def _reopen(self) -> None:
        """Removes the flag that the run is over: it goes on."""
        if not self._reopened:
            if EVERYTHING in cancelled_ids(await self._channel.fetch(self._names.cancel)):
                await self._channel.delete([self._names.cancel])
            self._reopened = True

    def _open(self) -> set[str]:
        return set(self._known.open) | self._mine

    async def _read(self) -> None:
        """Follows `calls.jsonl`."""
        while True:
            await self._read_on()
            await asyncio.sleep(_POLL_S)

    async def _read_on(self) -> None:
        data = await asyncio.to_thread(_complete, self.run_dir / CALLS_FILE, self._offset)
        self._offset += len(data)
        for line in data.decode(errors="replace").splitlines():
            record = record_of(line)
            if record is not None:
                self._learn(record)
        if data:
            async with self._changed:
                self._changed.notify_all()

    def _learn(self, record: Record) -> None:
        self._known.feed(record, now=0.0)
        self._mine.discard(record.id)
        if isinstance(record, FinalRecord):
            self._outcomes.setdefault(invocation_of(record.id, record.delivery), record.outcome)


def _complete(path: Path, offset: int) -> bytes:
    """Whole lines from an offset on."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]
