"""A rank's whole state in the channel: written beside the computation, at least two kept, the oldest one counted on.

A replacement starts from the newest checkpoint it finds and repeats the iterations since then from the merged
objects that are still there. What a rank declares durable is what the oldest of them needs, so even a
checkpoint whose put was lost costs nothing but repeated work. Where peers run ahead of each other, checkpoints are kept
back to the last iteration of which everything has arrived: what is lost later can be sent again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import CorruptMessage
from ephemeron.training.tensors import Arrays, decode_state, encode_state


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint that is in the channel."""

    iteration: int
    """The next iteration to compute."""
    applied: int
    """Versions that the parameters have seen."""


BEGINNING = Saved(0, 0)
"""Where a rank starts for which no checkpoint is early enough. Nothing has to be stored for it."""


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one rank."""

    channel: Channel
    keys: Keys
    rank: int
    saved: list[Saved] = field(default_factory=lambda: [BEGINNING])
    """Those that count, ascending; the beginning is one of them until two later ones are enough."""
    intact: int = 0
    """Versions from this one on cannot have been deleted before the state was read."""
    last_write_s: float = 0.0
    superseded: list[str] = field(default_factory=list)

    @property
    def durable(self) -> int:
        """Versions that no replacement would need again."""
        return self.saved[0].applied if len(self.saved) > 1 else 0

    async def write(
        self, arrays: Arrays, meta: dict[str, Any], *, iteration: int, applied: int, acknowledged: int
    ) -> int:
        """Stores a checkpoint and returns its bytes. `delete_superseded` deletes those that it replaces.

        Args:
            arrays, meta: the state.
            iteration: the next one to compute.
            applied: versions that the parameters have seen.
            acknowledged: iterations of which everything that this rank sent has arrived. What is lost of a later one
                can only be sent again from a checkpoint before it.
        """
        began = asyncio.get_running_loop().time()
        before = [s for s in self.saved if s.iteration < iteration]
        first = max(0, min(len(before) - 1, sum(s.iteration <= acknowledged for s in before) - 1))
        kept = [*before[first:], Saved(iteration, applied)]
        self.superseded += [self.keys.state(self.rank, s.iteration) for s in before[:first] if s != BEGINNING]
        data = encode_state(arrays, {**meta, "saved": [[s.iteration, s.applied] for s in kept]})
        await self.channel.put(self.keys.state(self.rank, iteration), [data])
        self.saved = kept
        self.last_write_s = asyncio.get_running_loop().time() - began
        return len(data)

    async def delete_superseded(self) -> None:
        """Deletes the checkpoints that later ones have made superseded."""
        gone, self.superseded = self.superseded, []
        if gone:
            await self.channel.delete(gone)

    async def read(self, iteration: int, deadline: float) -> tuple[Arrays, dict[str, Any]]:
        """A checkpoint that is known to be there, or about to be."""
        key = self.keys.state(self.rank, iteration)
        received = await self.channel.get(key, deadline=deadline)
        found = self._decode(received.data, key)
        self.intact = self.durable
        return found

    async def newest(self, not_after: int | None = None) -> tuple[Arrays, dict[str, Any]] | None:
        """The newest checkpoint that can be read, of an iteration up to `not_after`, or None. Lists: for recovery only."""
        for later, key in enumerate(reversed(await self.channel.list(self.keys.states(self.rank)))):
            data = await self.channel.fetch(key)
            if data is not None:
                try:
                    found = self._decode(data, key)
                except CorruptMessage:
                    continue
                if not_after is None or found[1]["iteration"] <= not_after:
                    self.intact = self.saved[-1].applied if later else self.durable
                    return found
        self.saved = [BEGINNING]
        return None

    def _decode(self, data: memoryview, key: str) -> tuple[Arrays, dict[str, Any]]:
        arrays, meta = decode_state(data, key=key)
        try:
            self.saved = [Saved(i, a) for i, a in meta["saved"]]
        except (KeyError, TypeError, ValueError):
            raise CorruptMessage("not a checkpoint of ours", key=key) from None
        return arrays, meta
