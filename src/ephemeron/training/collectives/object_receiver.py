"""Receiving objects of other ranks: when to poll for each, how long to wait, and what the wait took.

One implementation for contributions, merged shards and messages between pipeline stages.

Poll schedule: prediction of the time at which an awaited object appears in a store that has to be polled.

A poll too early costs a request; a poll too late costs the time of all ranks. Each stream (a kind of object from a
given rank) remembers how long after a reference time its last objects appeared. The first poll is made at the time that
would have cost least for these appearances: the delay after each of them, and `worth_s` for every poll that finds
nothing. Where appearances scatter by more than a poll is worth, that time is early; where they do not, one poll in some
ten finds nothing. The latest appearance is left out: an object that is very late (its sender died, or started last)
changes nothing.

An invocation begins with a memory of three rounds, which grows with the number of observations: the first rounds are slow,
and a long memory would keep them in the estimates of all ranks for as many rounds again as there are waits in a round. A
successor starts with its predecessor's estimates.

A poll that succeeds does not tell how long the object had been stored. The sender's time stamp would, if clocks agreed and
if the duration of the put were known; but a poll that succeeds just after one that found nothing has found the object fresh,
and so the age of that object is the one to compare with. An error of the clocks is in both numbers. Until a poll has found
nothing, there is no prediction and polls are made at once; and while every poll succeeds, objects are taken for older and
older, until one poll finds nothing.

What did not help: always waiting until all but one of the objects would have appeared. Where times scatter, the lateness of
one rank is in the waits of all: with steps of 100 ms that scatter by 15 ms, rounds took 28 % longer than over a store that
can wait (now 11 %). Nor did larger intervals between polls: they save as many polls as a later first poll does, for more
time. Nor did a single estimate that moves up and down by steps: it took a hundred rounds to forget one late start, each of
them as late as the one before had made it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ephemeron.communication.channels.base import GROWTH, LEAST_STEP_S, Channel, Received
from ephemeron.errors import ChannelTimeout, ReplacementsFailed
from ephemeron.events import Phase
from ephemeron.training.collectives.group import Arrivals, StalledPeers, Trace

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


# -- waiting for an object of another rank ------------------------------------------------------------------------


_log = logging.getLogger(__name__)

RECHECK_S = 0.25
"""Seconds between two reads of an object that does not count."""


class ArrivedObject(NamedTuple, Generic[T]):
    """An object that has arrived."""

    value: T
    """Result of `accept`."""
    received: Received
    found: float
    """Loop time of the request that found it."""
    late: bool
    """Whether it took longer than the timeout, or was preceded by an object that did not count."""


async def wait_for_object(
    channel: Channel,
    key: str,
    *,
    timeout_s: Callable[[], float],
    stalled: Callable[[], Awaitable[StalledPeers]],
    on_timeout: Callable[[StalledPeers], Awaitable[None]],
    accept: Callable[[memoryview], T | None],
    expected_at: float | None = None,
) -> ArrivedObject[T]:
    """Waits for an object, and calls `on_timeout` whenever it is late.

    Stalled peers may get some more time (`StalledPeers.grace_s`). The wait continues during that time: a rank that paused
    instead would be late itself, and with it all objects that its peers wait for.

    Args:
        channel: of the run.
        key: of the object.
        timeout_s: seconds after which it is late; asked anew for every wait.
        stalled: finds the ranks that should send it, once it is late.
        on_timeout: raises to end the wait, returns to go on with it.
        accept: decodes the object; None: it does not count, and another one will replace it.
        expected_at: loop time of the first poll.

    Raises:
        ReplacementsFailed: from `on_timeout`; names the key and the problem there, too.
        ChannelUnreachable: the store does not answer.
    """
    loop = asyncio.get_running_loop()
    due, late, suspects = loop.time() + timeout_s(), False, None
    while True:
        asked = loop.time()
        try:
            received = await channel.get(key, deadline=due, expected_at=expected_at)
        except ChannelTimeout as e:
            missing = e
        else:
            value = accept(received.data)
            if value is not None:
                return ArrivedObject(value, received, asked + received.waited_s, late)
            late, missing = True, ChannelTimeout("another object is stored there than the awaited one", key=key)
            if loop.time() < due:
                await asyncio.sleep(RECHECK_S)
                continue
        late = True
        if suspects is None:
            suspects = await stalled()
            if suspects.grace_s > 0:
                due = loop.time() + suspects.grace_s
                continue
        _log.info("%s is late; ranks %s of iteration %d", key, list(suspects.ranks), suspects.iteration)
        await handle_timeout(on_timeout, suspects, missing)
        due, suspects = loop.time() + timeout_s(), None


async def handle_timeout(on_timeout: Callable[[StalledPeers], Awaitable[None]], stalled: StalledPeers, missing: ChannelTimeout) -> None:
    """Calls `on_timeout`; its error then names the missing key and what was found in its place."""
    try:
        await on_timeout(stalled)
    except ReplacementsFailed as e:
        said = f"{e.problem}; {missing.problem} (key {missing.key})"
        raise ReplacementsFailed(said, rank=e.rank, attempt=e.attempt, iteration=e.iteration) from e


# -- poll schedule ------------------------------------------------------------------------------------------------


MEMORY = 16
"""Rounds in memory, once there were enough; the latest of these does not count."""
FEWEST, SLOWLY = 3, 4
"""Rounds in memory at first, and the number of rounds after which the memory grows by one."""
AGEING, AGEING_GROWTH = 0.01, 1.1
"""Share of the interval between polls by which objects are taken for older while every poll succeeds, and its growth."""


def cheapest(appeared: Sequence[float], latency_s: float, worth_s: float) -> float:
    """Time of the first poll that would have cost least for all these appearances.

    Args:
        appeared: seconds, ascending, at least one.
        latency_s: duration of a request.
        worth_s: seconds of waiting that a poll which finds nothing is worth.

    Returns:
        One of `appeared`; the last one of several with the same cost.
    """
    return min(reversed(appeared), key=lambda at: _cost(appeared, at, latency_s, worth_s))


def _cost(appeared: Sequence[float], at: float, latency_s: float, worth_s: float) -> float:
    cost, missed, step = 0.0, 0.0, max(latency_s, LEAST_STEP_S)
    for x in appeared:
        while at < x:
            at, step, missed = at + latency_s + step, step * GROWTH, missed + worth_s
        cost += at - x + missed
    return cost


@dataclass(slots=True)
class _KeyStream:
    appeared: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    """Seconds after the reference."""
    observed: int = 0
    """Number of rounds in this invocation."""
    fresh_age_s: float | None = None
    """Age, by the clocks, of an object that has just appeared; exact to about `gap_s`, the interval between polls."""
    gap_s: float = 0.0
    """Interval between the last two polls when the first of them found nothing; grows with every round since."""
    chosen: float | None = None
    """The prediction, until the next appearance is known."""

    def recent(self) -> list[float]:
        """Appearances that count, ascending."""
        return sorted(list(self.appeared)[-min(MEMORY, FEWEST + self.observed // SLOWLY) :])[:-1]

    def typical(self) -> tuple[float, float, float]:
        """Earliest, median and latest of these."""
        recent = self.recent()
        return recent[0], recent[len(recent) // 2], recent[-1]

    def predict(self, latency_s: float, worth_s: float) -> float | None:
        if self.chosen is None and len(self.appeared) > 1:
            self.chosen = cheapest(self.recent(), latency_s, worth_s)
        return self.chosen

    def observe(self, after_s: float, gap_s: float, age_s: float) -> float:
        fresh = self.fresh_age_s
        if gap_s > 0:
            self.gap_s = gap_s
            after_s -= gap_s / 2
            middle = age_s - gap_s / 2
            known = middle if fresh is None else min(max(fresh, age_s - gap_s), age_s)
            self.fresh_age_s = known + 0.3 * (middle - known)
        elif fresh is None:
            return after_s
        else:
            after_s -= max(0.0, age_s - fresh)
            self.gap_s *= AGEING_GROWTH
            self.fresh_age_s = min(fresh, age_s) - AGEING * self.gap_s
        self.observed, self.chosen = self.observed + 1, None
        self.appeared.append(after_s)
        return after_s


@dataclass(slots=True)
class ArrivalPredictor:
    """Prediction of arrivals: by stream, seconds between a reference time and the appearance of the object."""

    latency_s: float = 0.0
    """Duration of a request: at first the store's usual one, later that of polls that found nothing, if it is less."""
    worth_s: float = 0.005
    """Seconds of waiting that cost as much as a poll which finds nothing."""
    streams: dict[str, _KeyStream] = field(default_factory=dict)

    def predict(self, stream: str, reference: float) -> float | None:
        """Time at which to poll first, or None if nothing is known yet."""
        s = self.streams.get(stream)
        after_s = None if s is None else s.predict(self.latency_s, self.worth_s)
        return None if after_s is None else reference + after_s

    def polled(self, took_s: float) -> None:
        """Takes in the duration of a request that found nothing."""
        self.latency_s += 0.3 * (min(took_s, self.latency_s) - self.latency_s)

    def observe(self, stream: str, reference: float, *, found: float, gap_s: float, age_s: float) -> float:
        """Takes in that an object was found by a request made at `found`.

        Args:
            stream: of the object.
            reference: as in `predict`.
            found: time of the request.
            gap_s: seconds since the request before, which found nothing; 0: there was none.
            age_s: seconds between the sender's time stamp and `found`, each by its own clock.

        Returns:
            Estimated time at which it appeared.
        """
        return reference + self.streams.setdefault(stream, _KeyStream()).observe(found - reference, gap_s, age_s)

    def state(self) -> Arrivals:
        """State for a successor: per stream three appearances, the age of a fresh object, and the last gap, in seconds."""
        return {
            name: tuple(round(x, 6) for x in (*s.typical(), s.fresh_age_s, s.gap_s))
            for name, s in self.streams.items()
            if len(s.appeared) > 1 and s.fresh_age_s is not None
        }

    def load(self, state: Arrivals) -> None:
        """Restores what `state` returned; observations of this invocation count for more."""
        for name, (*typical, fresh_age_s, gap_s) in state.items():
            appeared = deque([*typical, typical[-1]], maxlen=MEMORY)
            self.streams[name] = _KeyStream(appeared=appeared, fresh_age_s=fresh_age_s, gap_s=gap_s)
