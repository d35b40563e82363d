"""Who is whom: attempts are claimed before they are launched and started once, by create-only puts.

`claim/RANK/N` belongs to whoever may launch attempt N of a rank: its predecessor (a relay), the client, or a peer
that has waited too long. `start/RANK/N` belongs to the invocation that is attempt N: a platform that delivers a
call twice finds the second one stepping aside. An attempt that sees the next one claimed, and has not done so
itself, is superseded. Whatever it still sends is harmless: under BSP and HAP it is the same bytes, and under other
protocols what is there already counts.

`replaced/N` is the N-th replacement of the run. There are `max_replacements` of them, whoever replaces whom.
"""

from __future__ import annotations

from dataclasses import dataclass

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import KeyExists, ReplacementsFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a claim says."""

    at_s: float
    """When it was made, in seconds of the run."""
    not_after: int | None = None
    """The iteration after which the attempt must not start; None: wherever it finds a checkpoint."""
    tries: int = 0
    """Replacements in a row of that rank by peers that had waited in vain."""

    def to_text(self) -> str:
        told = "-" if self.not_after is None else self.not_after
        return f"{self.at_s:.3f} {told} {self.tries}"

    @classmethod
    def of(cls, text: str) -> Claim:
        at_s, told, tries = text.split()
        return cls(at_s=float(at_s), not_after=None if told == "-" else int(told), tries=int(tries))

    def tries_at(self, iteration: int) -> int:
        """Replacements in a row that still count at an iteration: one less for each that the rank has come further."""
        further = 0 if self.not_after is None else max(0, iteration - self.not_after)
        return max(0, self.tries - further)


async def take(channel: Channel, key: str, owner: str) -> bool:
    """Whether the key was free and is ours now."""
    try:
        await channel.put(key, [owner.encode()], create=True)
    except KeyExists:
        return False
    return True


async def claim(channel: Channel, keys: Keys, rank: int, attempt: int, said: Claim) -> bool:
    """Whether we may launch this attempt."""
    return await take(channel, keys.claim(rank, attempt), said.to_text())


async def claimed(channel: Channel, keys: Keys, rank: int, attempt: int) -> Claim | None:
    """What the claim of an attempt says; None: nobody had to claim it."""
    data = await channel.fetch(keys.claim(rank, attempt))
    return None if data is None else Claim.of(bytes(data).decode())


async def latest_attempt(channel: Channel, keys: Keys, rank: int) -> int:
    """Highest attempt claimed for a rank. Lists: for the cold path."""
    claims = await channel.list(keys.claims(rank))
    return max((int(key.rpartition("/")[2]) for key in claims), default=0)


async def check_left(channel: Channel, keys: Keys, most: int, *, rank: int, iteration: int | None) -> int:
    """How many functions have been replaced in this run. Lists: for the cold path.

    Raises:
        ReplacementsFailed: as many as may be.
    """
    spent = len(await channel.list(keys.replacements))
    if spent >= most:
        raise ReplacementsFailed(
            f"it would have to be replaced, and {spent} functions of this run have been, which is the limit; find out why "
            "they are lost, then resume, with a larger --max-replacements if need be",
            rank=rank, iteration=iteration,
        )  # fmt: skip
    return spent


async def spend(channel: Channel, keys: Keys, most: int, *, rank: int, iteration: int | None) -> None:
    """Takes one of the run's replacements, for good.

    Raises:
        ReplacementsFailed: there are none left.
    """
    while True:
        number = await check_left(channel, keys, most, rank=rank, iteration=iteration)
        for free in range(number, most):
            if await take(channel, keys.replacement(free), f"{rank}"):
                return


async def restore(channel: Channel, keys: Keys) -> None:
    """Gives a run that is resumed all its replacements again."""
    await channel.delete(await channel.list(keys.replacements))
