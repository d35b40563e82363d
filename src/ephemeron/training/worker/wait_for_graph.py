"""Who is to blame when everybody waits: the one that nobody hears waiting.

Where stages wait for each other, a rank that is late may itself be waiting for another. So whoever has lost patience
says for whom it waits, gives the others a moment to say so too, and follows what they say to a rank that waits for
nobody: that one is dead, or far too slow. Whoever waits for a later iteration than the one that is missed of it has sent
what is missed: it was lost, and has to be sent again. Where all wait in a circle within one iteration, something was lost
that nobody can name, and everybody replaces the one it waits for. Patience runs out at about the same time everywhere, because waits of one
iteration begin within it and patience is ten of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import ChannelTimeout
from ephemeron.training.collectives import StalledPeers, all_of
from ephemeron.training.collectives.group import MOMENT

SAY_WITHIN = 2 * MOMENT
"""Share of the patience that others get to say for whom they wait. Who waits for a merged shard has given its aggregator a
moment before it says so."""
FRESH = 1.5
"""Patiences after which what a rank said counts no more: it would have said so again."""


class WaitForGraph:
    """What one rank says and hears of waits.

    Args:
        now: seconds of the run.
        patience_s: by a multiple of the usual.
    """

    def __init__(
        self, channel: Channel, keys: Keys, *, rank: int, now: Callable[[], float], patience_s: Callable[[float], float]
    ) -> None:
        self._channel, self._keys, self._rank, self._now, self._patience_s = channel, keys, rank, now, patience_s
        self._ahead: dict[float, float] = {}
        self._waits: dict[tuple[int, ...], tuple[float, int]] = {}
        """Ranks that this one waits for, since when it says so, and the iteration; several waits may go on at once."""

    async def culprits(self, blame: StalledPeers) -> list[tuple[int, int]]:
        """Ranks to replace, each with the iteration that is missed of it; none: others will find them."""
        self._waits[tuple(blame.ranks)] = (self._now(), blame.iteration)
        await self._channel.put(self._keys.wait(self._rank), [json.dumps(self._current()).encode()])
        if await self._come(blame.keys, SAY_WITHIN * self._patience_s(1)):
            return []
        found: dict[int, int] = {}
        seen: set[int] = set()
        own = [(rank, iteration) for _, iteration, ranks in self._current() for rank in ranks]
        todo, around = list(own), False
        while todo:
            rank, iteration = todo.pop()
            if rank == self._rank:
                around |= iteration >= blame.iteration  # else it is ours that was lost, and we shall be replaced
                continue
            if rank in seen:
                continue
            seen.add(rank)
            heard = await self._heard(rank)
            if not heard or min(b.iteration for b in heard) > iteration:
                found[rank] = iteration
            else:
                todo += [(other, b.iteration) for b in heard for other in b.ranks]
        return sorted((found or dict(own if around else [])).items())

    async def _come(self, keys: Sequence[str], within_s: float) -> bool:
        """Gives other ranks time to say for whom they wait. True as soon as all that is missing has come; False: it has not."""
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
        self._waits = {r: (t, i) for r, (t, i) in self._waits.items() if i == latest and self._counts(t)}
        return [(t, i, ranks) for ranks, (t, i) in self._waits.items()]

    def _counts(self, since: float) -> bool:
        age_s = self._now() - since
        if age_s < 0:  # said by a clock that is ahead of ours: it counts from when we first hear it
            age_s = self._now() - self._ahead.setdefault(since, self._now())
        return age_s <= FRESH * self._patience_s(1)

    async def _heard(self, rank: int) -> list[StalledPeers]:
        data = await self._channel.fetch(self._keys.wait(rank))
        if data is None:
            return []
        return [
            StalledPeers(iteration, ranks) for since, iteration, ranks in json.loads(bytes(data)) if self._counts(since)
        ]
