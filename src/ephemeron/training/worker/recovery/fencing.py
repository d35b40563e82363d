"""Fencing tokens of attempts: each is claimed before it is launched and started once, by create-only puts.

- `claim/RANK/N` belongs to the process that launches attempt N of a rank: its predecessor (a hand-off), the client, or a peer
  whose wait has timed out.
- `start/RANK/N` belongs to the invocation that is attempt N. If a platform delivers a call twice, the second invocation ends.
- `replaced/N` is the N-th replacement of the run, of any rank. There are at most `max_replacements`.

Attempts of a rank are numbered through the run, those of generation G from G million on: the attempts of a later generation are
the larger ones, and a rank that stays in its invocation has the first number of the new generation.

An attempt is superseded when another process has claimed the next one. Its later messages do no harm: under BSP and HAP they
are the same bytes, and under other protocols an object that exists already counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import KeyExists, ReplacementsFailed

_PER_GENERATION = 1_000_000


def first_attempt(generation: int) -> int:
    """Number of a rank's first attempt in a generation."""
    return generation * _PER_GENERATION


def generation_of(attempt: int) -> int:
    """Generation to which an attempt belongs."""
    return attempt // _PER_GENERATION


def number_of(attempt: int) -> int:
    """Number of an attempt within its generation, from 0 on."""
    return attempt % _PER_GENERATION


def number_in(key: str) -> int:
    """Number at the end of a key: the attempt of a claim, a start or a hand-off, or a generation."""
    return int(key.rpartition("/")[2])


def attempt_text(attempt: int) -> str:
    """An attempt for people: `2`, or `2 of generation 1`."""
    generation, number = divmod(attempt, _PER_GENERATION)
    return f"{number} of generation {generation}" if generation else f"{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Content of a claim."""

    at_s: float
    """Time of the claim, in seconds since the launch of the run."""
    not_after: int | None = None
    """Latest iteration from which the attempt may start; None: any checkpoint."""
    tries: int = 0
    """Replacements in a row of that rank by peers whose waits had timed out."""

    def to_text(self) -> str:
        told = "-" if self.not_after is None else self.not_after
        return f"{self.at_s:.3f} {told} {self.tries}"

    @classmethod
    def of(cls, text: str) -> Claim:
        at_s, told, tries = text.split()
        return cls(at_s=float(at_s), not_after=None if told == "-" else int(told), tries=int(tries))

    def tries_at(self, iteration: int) -> int:
        """Replacements in a row that still count at an iteration: one less per iteration that the rank has finished since."""
        further = 0 if self.not_after is None else max(0, iteration - self.not_after)
        return max(0, self.tries - further)


async def take(channel: Channel, key: str, owner: str) -> bool:
    """Creates a key; whether it was free."""
    try:
        await channel.put(key, [owner.encode()], create=True)
    except KeyExists:
        return False
    return True


async def claim(channel: Channel, keys: Keys, rank: int, attempt: int, said: Claim) -> bool:
    """Claims an attempt; whether the caller may launch it."""
    return await take(channel, keys.claim(rank, attempt), said.to_text())


async def claimed(channel: Channel, keys: Keys, rank: int, attempt: int) -> Claim | None:
    """Claim of an attempt; None: it was not claimed, as the first one is not."""
    data = await channel.fetch(keys.claim(rank, attempt))
    return None if data is None else Claim.of(bytes(data).decode())


async def latest_attempt(channel: Channel, keys: Keys, rank: int) -> int:
    """Highest attempt claimed for a rank in the generation of `keys`. Lists keys: not for every iteration."""
    attempts = map(number_in, await channel.list(keys.claims(rank)))
    first = first_attempt(keys.generation)
    return max((a for a in attempts if generation_of(a) == keys.generation), default=first)


async def latest_begun(channel: Channel, keys: Keys) -> int:
    """Number of the latest generation that has begun; 0: the first one. Lists keys: not for every iteration."""
    return max((number_in(key) for key in await channel.list(keys.begins)), default=0)


async def check_left(channel: Channel, keys: Keys, most: int, *, rank: int, iteration: int | None) -> int:
    """Number of functions replaced in this run. Lists keys: not for every iteration.

    Raises:
        ReplacementsFailed: it is the limit.
    """
    spent = len(await channel.list(keys.replacements))
    if spent >= most:
        raise ReplacementsFailed(
            f"it would have to be replaced, and {spent} functions of this run have been, which is the limit; find out why "
            "they are lost, then resume, with a larger --max-replacements if need be",
            rank=rank,
            iteration=iteration,
        )
    return spent


async def spend(channel: Channel, keys: Keys, most: int, *, rank: int, iteration: int | None) -> None:
    """Takes one of the run's replacements.

    Raises:
        ReplacementsFailed: there are none left.
    """
    while True:
        number = await check_left(channel, keys, most, rank=rank, iteration=iteration)
        for free in range(number, most):
            if await take(channel, keys.replacement(free), f"{rank}"):
                return


async def restore(channel: Channel, keys: Keys) -> None:
    """Restores the full number of replacements, for a run that is resumed."""
    await channel.delete(await channel.list(keys.replacements))


Exit = Literal["finished", "relayed", "stopped", "duplicate", "fenced", "left", "released"]
"""Outcome of an invocation: the run is over; its successor goes on; the run was stopped at a checkpoint; another invocation
is the same attempt; a newer attempt has been claimed; the next generation goes on without this invocation."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """Lease of one attempt."""

    rank: int
    attempt: int
    tries: int
    """Replacements in a row, by peers, that led to this attempt."""
    has_successor: bool = False
    """Whether this attempt has claimed and invoked the next one."""
    passed_on: bool = False
    """Whether it has ended in the middle of an iteration, in favour of its successor."""

    @property
    def fencing_attempt(self) -> int:
        """First attempt whose claim, being another party's, supersedes this attempt."""
        return self.attempt + (2 if self.has_successor else 1)

    def claim_for_successor(self, run_s: float, *, not_after: int | None = None) -> Claim:
        """Claim of the next attempt.

        Args:
            run_s: seconds of the run.
            not_after: see `Claim`.
        """
        return Claim(at_s=run_s, not_after=not_after, tries=self.tries)

    def exit_after_timeout(self, *, fenced: bool, finished: bool, stopped: bool) -> Exit | None:
        """Outcome when a peer is late; None: this attempt still holds the lease.

        Args:
            fenced: a claim of `fencing_attempt` exists.
            finished: the run's result exists.
            stopped: the user has asked to stop.
        """
        return "fenced" if fenced else "finished" if finished else "stopped" if stopped else None

    def pass_on(self) -> bool:
        """Marks the lease as passed on; False where it was so already, by another wait that ended at the same time."""
        first, self.passed_on = not self.passed_on, True
        return first
