"""A channel that survives faults of its store. It wraps the meter, so that every repeated request is counted.

One retry policy for all stores: which failures are transient, and the pause before the next request.

There are three classes of failures. *Throttled* (503 SlowDown, 429, a cache out of memory): the request was understood, and more of
them make it worse, so pauses begin long. *Unavailable* (refused, reset, cut short, timed out, 500, a server that starts):
the result is unknown, and most such failures are short, so the first pause is short. *Refused* (403, no such bucket, a wrong
password, an untrusted certificate): no request will ever succeed, so none is made. The class of an error tells its kind.

Pauses double from the first to the longest, each drawn from its upper half, so that hundreds of functions that failed
together do not retry together (a full draw would give some of them very short pauses; a fixed pause keeps them in step). After
`total_s` of failures without an answer the last error is raised, with the number of requests that it cost.

Repeating is safe by operation: `put`, `delete`, `reduce` and `accumulate` are idempotent by contract, reads change
nothing, and a create-only put whose answer was lost is resolved by reading the stored object (`channels.retrying`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ephemeron.communication.channels.base import Buffer, Channel, Received, Wrapper, joined, poll
from ephemeron.communication.channels.reduction import SupportsReduction, Vector
from ephemeron.errors import ChannelRefused, ChannelThrottled, ChannelTimeout, ChannelUnreachable, KeyExists

T = TypeVar("T")

TELL_AFTER_S = 5.0
"""Shorter outages are not reported."""
_READS = 3
"""Reads of an object that may be the writer's own before it counts as another's: reads can be cut off."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Report of a store that does not answer."""

    seconds: float
    requests: int
    """Failed ones."""
    problem: str
    over: bool


class Retrying(Wrapper):
    """Repeats failed requests by a policy.

    Time without the store does not count as waiting: the deadline of a `get` moves by the time for which requests of this
    channel failed meanwhile, since the writer of the key could not reach the store either.

    Args:
        inner: channel whose errors are retried.
        policy: pauses and limits.
        rng: for jitter; of this writer alone.
        told: called for outages longer than `TELL_AFTER_S`: once, and when they are over.
        latest: loop time that no deadline is moved past.
    """

    def __init__(
        self,
        inner: Channel,
        *,
        policy: RetryPolicy,
        rng: random.Random,
        told: Callable[[Outage], None] = lambda outage: None,
        latest: float = float("inf"),
    ) -> None:
        super().__init__(inner)
        self.policy = policy
        self.repeated = 0
        """Requests that failed and were made again."""
        self._rng, self._told, self._latest = rng, told, latest
        self._failing: set[object] = set()
        """Operations whose last request failed."""
        self._since = 0.0
        self._repeated_before = 0
        self._is_told = False
        self.outages_s = self._covered_until = 0.0

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        if not create:
            await self._persist(lambda: self.inner.put(key, buffers))
            return
        unsure, others = False, 0

        async def attempt() -> None:
            nonlocal unsure, others
            try:
                await self.inner.put(key, buffers, create=True)
            except ChannelUnreachable:
                unsure = True
                raise
            except KeyExists:
                # An earlier request may have been served, and its answer lost. The stored object tells: competing
                # writers put different bytes (`Framed` adds a token to all create-only objects).
                if not unsure:
                    raise
                written = memoryview(joined(buffers))
                while (there := await self.inner.fetch(key)) != written:
                    others += 1
                    if there is None or others == _READS:
                        raise

        await self._persist(attempt)

    async def fetch(self, key: str) -> memoryview | None:
        return await self._persist(lambda: self.inner.fetch(key))

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        loop = asyncio.get_running_loop()
        began, before = loop.time(), self.outages_s

        def moved() -> float:
            return max(deadline, min(deadline + self.outages_s - before, self._latest))

        async def attempt() -> Received:
            if self.traits.waits:
                return await self.inner.get(key, deadline=moved(), expected_at=expected_at)
            first_s = self.traits.latency_s
            return await poll(self.fetch, key, deadline=moved(), expected_at=expected_at, first_s=first_s)

        while True:
            try:
                received = await (self._persist(attempt, waits=True) if self.traits.waits else attempt())
            except ChannelTimeout:
                if loop.time() >= moved():
                    raise
            else:
                waited_s = received.waited_s if self.outages_s == before else loop.time() - began
                return received._replace(waited_s=waited_s)

    async def delete(self, keys: Iterable[str]) -> None:
        names = list(keys)
        await self._persist(lambda: self.inner.delete(names))

    async def list(self, prefix: str) -> list[str]:
        return await self._persist(lambda: self.inner.list(prefix))

    async def exists(self, key: str) -> bool:
        return await self._persist(lambda: self.inner.exists(key))

    def reducer(self) -> SupportsReduction | None:
        inner = self.inner.reducer()
        return None if inner is None else _RetryingReduction(self, inner)

    async def _persist(self, attempt: Callable[[], Awaitable[T]], *, waits: bool = False) -> T:
        """Repeats `attempt` as long as the policy allows.

        Args:
            waits: it may have waited for its object before it failed.
        """
        loop = asyncio.get_running_loop()
        first, tries, me = 0.0, 0, object()
        try:
            while True:
                asked = loop.time()
                try:
                    return await attempt()
                except ChannelUnreachable as e:
                    now = loop.time()
                    if waits:
                        asked = now
                    if not tries:
                        first = now
                    tries += 1
                    self._failed(me, asked, e)
                    _log.debug("request %d failed: %s", tries, e)
                    pause_s = self.policy.pause_s(e, tries=tries, failing_s=now - first, rng=self._rng)
                    if pause_s is None:
                        if tries == 1:
                            raise
                        _log.warning("given up after %d requests in %.0f s: %s", tries, now - first, e)
                        text = f"{e.problem}; given up after {tries} requests in {now - first:.0f} s"
                        raise type(e)(text, key=e.key) from e
                    self.repeated += 1
                await asyncio.sleep(pause_s)
                self._cover(asked, loop.time())
        finally:
            self._answered(me)

    def _failed(self, who: object, asked: float, error: ChannelUnreachable) -> None:
        now = asyncio.get_running_loop().time()
        if not self._failing:
            self._since, self._repeated_before, self._is_told = asked, self.repeated, False
        self._failing.add(who)
        self._cover(asked, now)
        if not self._is_told and now - self._since >= TELL_AFTER_S:
            self._is_told = True
            self._tell(error.problem, over=False)

    def _answered(self, who: object) -> None:
        if who not in self._failing:
            return
        self._failing.discard(who)
        if not self._failing and self._is_told:
            self._tell("", over=True)

    def _tell(self, problem: str, *, over: bool) -> None:
        seconds = asyncio.get_running_loop().time() - self._since
        requests = self.repeated - self._repeated_before + (not over)
        if over:
            _log.info("the store answers again after %.0f s and %d failed requests", seconds, requests)
        else:
            _log.warning("the store has not answered for %.0f s: %s", seconds, problem)
        self._told(Outage(seconds=seconds, requests=requests, problem=problem, over=over))

    def _cover(self, start: float, end: float) -> None:
        """Adds an interval to the time of outages; intervals of concurrent operations overlap."""
        start = max(start, self._covered_until)
        if end > start:
            self.outages_s += end - start
            self._covered_until = end


class _RetryingReduction(SupportsReduction):
    """Repeats contributions that may have arrived: servers ignore those that they have counted."""

    def __init__(self, outer: Retrying, inner: SupportsReduction) -> None:
        self._outer, self._inner = outer, inner

    async def reduce(self, key: str, *, rank: int, world: int, weight: float, vector: Vector) -> None:
        await self._outer._persist(lambda: self._inner.reduce(key, rank=rank, world=world, weight=weight, vector=vector))

    async def accumulate(self, key: str, *, rank: int, iteration: int, delta: Vector) -> Vector:
        return await self._outer._persist(lambda: self._inner.accumulate(key, rank=rank, iteration=iteration, delta=delta))

    async def heard(self, key: str) -> dict[int, int]:
        return await self._outer._persist(lambda: self._inner.heard(key))


# -- one retry policy for all stores ------------------------------------------------------------------------------


CHANNEL_RETRY_S = 300.0
"""By default a run survives five minutes without its store: a restart, a failover, a long throttling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryBackoff:
    """Pauses for one class of errors."""

    first_s: float
    most_s: float
    growth: float = 2.0

    def pause_s(self, tries: int, rng: random.Random) -> float:
        """Seconds before the next request, after so many failed ones, at least one."""
        longest = min(self.most_s, self.first_s * self.growth ** min(tries - 1, 60))
        return longest * rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Pauses and limits of repeated requests."""

    total_s: float = CHANNEL_RETRY_S
    """Seconds of failures, by the loop's clock, after which an operation fails; 0: at once."""
    unavailable: RetryBackoff = field(default_factory=lambda: RetryBackoff(first_s=0.05, most_s=10.0))
    throttled: RetryBackoff = field(default_factory=lambda: RetryBackoff(first_s=0.4, most_s=20.0))

    def pause_s(self, error: ChannelUnreachable, *, tries: int, failing_s: float, rng: random.Random) -> float | None:
        """Seconds until the next request; None: there is none.

        Args:
            error: of the latest request.
            tries: requests that failed.
            failing_s: since the first of these was made.
            rng: of this writer alone.
        """
        if isinstance(error, ChannelRefused) or failing_s >= self.total_s:
            return None
        backoff = self.throttled if isinstance(error, ChannelThrottled) else self.unavailable
        return min(backoff.pause_s(tries, rng), self.total_s - failing_s)  # the last request is made at the very end


BRIEF = RetryPolicy(total_s=3.0)
"""Policy of interactive commands: a wrong address must fail at once."""
