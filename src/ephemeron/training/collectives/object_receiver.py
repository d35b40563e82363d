"""Receiving objects of other ranks: when to poll for each, how long to wait, and what the wait took.

One implementation for contributions, merged shards and messages between pipeline stages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ephemeron.communication.channels.base import Channel
from ephemeron.events import Phase
from ephemeron.training.collectives.group import StalledPeers, Trace
from ephemeron.training.collectives.object_wait import wait_for_object
from ephemeron.training.collectives.poll_schedule import ArrivalPredictor
from ephemeron.training.collectives.state import Arrivals

T = TypeVar("T")


class ObjectReceiver:
    """Receives objects that other ranks are about to store.

    Args:
        channel: of the run.
        trace: of this rank.
        poll_worth_s: see `Group`.
        on_timeout: see `Group`.
    """

    def __init__(
        self, channel: Channel, trace: Trace, *, poll_worth_s: float, on_timeout: Callable[[StalledPeers], Awaitable[None]]
    ) -> None:
        self._channel, self._trace, self._on_timeout = channel, trace, on_timeout
        self._predictor = ArrivalPredictor(channel.traits.latency_s, poll_worth_s)
        self._polled = not channel.traits.waits

    async def receive(
        self,
        key: str,
        stream: str,
        *,
        phase: Phase,
        reference: float | None,
        timeout_s: Callable[[], float],
        stalled: Callable[[], Awaitable[StalledPeers]],
        decode: Callable[[memoryview], T | None],
        sent_at: Callable[[T], float],
    ) -> tuple[T, float | None]:
        """Waits for one object.

        Args:
            key: of the object.
            stream: name of the objects whose arrivals resemble this one's.
            phase: under which reading and decoding are recorded.
            reference: loop time that arrivals of the stream follow; None: they follow none this time.
            timeout_s: see `wait_for_object`.
            stalled: see `wait_for_object`.
            decode: decodes the object; None: it does not count, and another object will replace it.
            sent_at: seconds of the run at which its put began, by the sender's clock.

        Returns:
            The decoded object, and the loop time at which it appeared in the channel, where that can be told.

        Raises:
            ReplacementsFailed, CorruptMessage, ChannelUnreachable: see `wait_for_object`.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        predicted = self._predictor.predict(stream, reference) if self._polled and reference is not None else None
        value, received, found, late = await wait_for_object(
            self._channel, key, timeout_s=timeout_s, stalled=stalled, on_timeout=self._on_timeout, accept=decode, expected_at=predicted
        )
        appeared = None
        if self._polled:
            age_s = self._trace.run_time() - (loop.time() - found) - sent_at(value)
            if received.poll_s > 0:
                self._predictor.polled(received.poll_s)
            # Intervals between polls grow by half: the last one was a third of the whole wait.
            gap_s = min(0.25, (found - max(began, predicted or 0)) / 3) if late or received.polls else 0.0
            appeared = found - gap_s / 2
            if reference is not None:
                appeared = self._predictor.observe(stream, reference, found=found, gap_s=gap_s, age_s=age_s)
        if found > began:
            self._trace.record("wait", began, found)
        self._trace.record(phase, found, loop.time())
        return value, appeared

    def state(self) -> Arrivals:
        """See `ArrivalPredictor.state`."""
        return self._predictor.state()

    def load(self, state: Arrivals) -> None:
        """Restores what `state` returned."""
        self._predictor.load(state)
