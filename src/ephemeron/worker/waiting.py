"""Who is to blame when everybody waits: the one that nobody hears waiting.

Where stages wait for each other, a rank that is late may itself be waiting for another. So whoever has lost patience
says for whom it waits, gives the others a moment to say so too, and follows what they say to a rank that waits for
nobody: that one is dead, or far too slow. Patience runs out at about the same time everywhere, because waits of one
iteration begin within it and patience is ten of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from ephemeron.channels.base import Channel
from ephemeron.channels.keys import Keys
from ephemeron.collectives import Blame

MOMENT = 0.2
"""Share of the patience that others get to say for whom they wait."""
FRESH = 1.5
"""Patiences after which what a rank said counts no more: it would have said so again."""


class Waiting:
    """What one rank says and hears of waits.

    Args:
        now: seconds of the run.
        patience_s: by a multiple of the usual.
    """

    def __init__(
        self, channel: Channel, keys: Keys, *, rank: int, now: Callable[[], float], patience_s: Callable[[float], float]
    ) -> None:
        self._channel, self._keys, self._rank, self._now, self._patience_s = channel, keys, rank, now, patience_s

    async def culprits(self, blame: Blame) -> list[tuple[int, int]]:
        """Ranks to replace, each with the iteration that is missed of it; none: those who are late wait for us."""
        said = [self._now(), blame.iteration, list(blame.ranks)]
        await self._channel.put(self._keys.wait(self._rank), [json.dumps(said).encode()])
        await asyncio.sleep(MOMENT * self._patience_s(1))
        found: dict[int, int] = {}
        seen = {self._rank}
        todo = [(rank, blame.iteration) for rank in blame.ranks]
        while todo:
            rank, iteration = todo.pop()
            if rank in seen:
                continue
            seen.add(rank)
            heard = await self._heard(rank)
            if heard is None:
                found[rank] = iteration
            else:
                todo += [(other, heard.iteration) for other in heard.ranks]
        return sorted(found.items())

    async def _heard(self, rank: int) -> Blame | None:
        data = await self._channel.fetch(self._keys.wait(rank))
        if data is None:
            return None
        since, iteration, ranks = json.loads(bytes(data))
        if self._now() - since > FRESH * self._patience_s(1):
            return None
        return Blame(iteration, ranks)
