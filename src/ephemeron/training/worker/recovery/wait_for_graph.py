"""Search for the peer that has to be replaced where ranks of a pipeline wait for each other: a wait-for graph.

A rank that is late may itself wait for another one. So a rank whose wait has timed out publishes for whom it waits, gives the
others time to publish theirs, and follows these edges:

- a rank that has published no wait is dead or far too slow: it is replaced;
- a rank that waits in a later iteration has sent the missing object, which was lost: it is replaced, and its replacement
  sends the object again;
- where all wait in a cycle within one iteration, a lost object cannot be attributed, and each rank replaces the one that it
  waits for.

Waits of one iteration time out at about the same time everywhere, because they begin within that iteration and the timeout
is ten iterations.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import ChannelTimeout
from ephemeron.training.collectives import StalledPeers, all_of
from ephemeron.training.collectives.group import GRACE_SHARE

_log = logging.getLogger(__name__)

PUBLISH_SHARE = 2 * GRACE_SHARE
"""Share of the timeout within which other ranks publish their waits. A rank that waits for a merged shard has given its
aggregator some time before it does so."""
EXPIRY = 1.5
"""Multiple of the timeout after which a published wait has expired: it would have been published again."""


class WaitForGraph:
    """One rank's view of the waits of all ranks.

    Args:
        channel: of the run.
        keys: of the run.
        rank: this rank.
        now: seconds of the run.
        timeout_s: timeout of a wait, by a multiple of the usual one.
    """

    def __init__(self, channel: Channel, keys: Keys, *, rank: int, now: Callable[[], float], timeout_s: Callable[[float], float]) -> None:
        self._channel, self._keys, self._rank, self._now, self._timeout_s = channel, keys, rank, now, timeout_s
        self._ahead: dict[float, float] = {}
        self._waits: dict[tuple[int, ...], tuple[float, int]] = {}
        """By the ranks that this one waits for: time of publication, and iteration. Several waits may go on at once."""

    async def suspects(self, stalled: StalledPeers) -> list[tuple[int, int]]:
        """Ranks to replace, each with the iteration of which an object is missing; none: other ranks will replace them."""
        self._waits[tuple(stalled.ranks)] = (self._now(), stalled.iteration)
        await self._channel.put(self._keys.wait(self._rank), [json.dumps(self._current()).encode()])
        if await self._arrived(stalled.keys, PUBLISH_SHARE * self._timeout_s(1)):
            return []
        found: dict[int, int] = {}
        seen: set[int] = set()
        own = [(rank, iteration) for _, iteration, ranks in self._current() for rank in ranks]
        edges, in_cycle = list(own), False
        while edges:
            rank, iteration = edges.pop()
            if rank == self._rank:
                in_cycle |= iteration >= stalled.iteration  # else this rank's own object was lost, and it is replaced
                continue
            if rank in seen:
                continue
            seen.add(rank)
            published = await self._published(rank)
            if not published or min(p.iteration for p in published) > iteration:
                found[rank] = iteration
            else:
                edges += [(other, p.iteration) for p in published for other in p.ranks]
        suspects = sorted((found or dict(own if in_cycle else [])).items())
        _log.info("waits for ranks %s at iteration %d; suspects %s", list(stalled.ranks), stalled.iteration, suspects)
        return suspects

    async def _arrived(self, keys: Sequence[str], within_s: float) -> bool:
        """Gives other ranks time to publish their waits. True as soon as all missing objects have arrived; False: they have not."""
        if not keys:
            await asyncio.sleep(within_s)
            return False
        deadline = asyncio.get_running_loop().time() + within_s
        try:
            await all_of(self._channel.get(key, deadline=deadline) for key in keys)
        except ChannelTimeout:
            return False
        return True

    def _current(self) -> list[tuple[float, int, tuple[int, ...]]]:
        """Own waits of the latest iteration: earlier ones are over."""
        latest = max((iteration for _, iteration in self._waits.values()), default=0)
        self._waits = {r: (t, i) for r, (t, i) in self._waits.items() if i == latest and self._is_valid(t)}
        return [(t, i, ranks) for ranks, (t, i) in self._waits.items()]

    def _is_valid(self, since: float) -> bool:
        age_s = self._now() - since
        if age_s < 0:  # the publisher's clock is ahead of this one's: the age counts from the first reading
            age_s = self._now() - self._ahead.setdefault(since, self._now())
        return age_s <= EXPIRY * self._timeout_s(1)

    async def _published(self, rank: int) -> list[StalledPeers]:
        data = await self._channel.fetch(self._keys.wait(rank))
        if data is None:
            return []
        return [StalledPeers(iteration, ranks) for since, iteration, ranks in json.loads(bytes(data)) if self._is_valid(since)]
