"""Replacing a peer that has been silent for too long: the failure detector of all patterns.

Who is late is a collective's to say (a contribution or a shard is missing, a parameter server has not heard of a rank), or
follows from who waits for whom where stages do (`wait_for_graph`). Whether it is replaced is decided here, in one way:

- not before it has been silent for longer than its pace allows (`timeouts`);
- not where it is seen to go on, in runs whose ranks do not wait for each other;
- not while the last attempt of it, whoever claimed it, may still be starting or repeating iterations. The time for that
  doubles with every attempt in vain, and claims say how many there were: whoever comes next does not begin anew;
- at most `MOST_TRIES` times for the same iteration, and `max_replacements` times in the whole run. Each replacement takes a
  number by a create-only put, so the limit holds however many replace each other, with a client and without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import ReplacementsFailed
from ephemeron.training.worker import fencing
from ephemeron.training.worker.fencing import Claim
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.timeouts import Timeouts

MOST_TRIES = 5
"""Replacements of a rank for the same iteration before the run is called broken."""


class FailureDetector:
    """What one rank does about silent peers.

    Args:
        channel, keys, spec: of the run.
        timeouts: what is known of paces.
        lifetime_s: of an invocation.
        now: loop time.
        run_now: seconds of the run.
        invoke: starts an attempt of a rank, as a claim says.
        note: tells the user.
    """

    def __init__(
        self, channel: Channel, keys: Keys, spec: RunSpec, timeouts: Timeouts, *, rank: int, lifetime_s: float,
        now: Callable[[], float], run_now: Callable[[], float],
        invoke: Callable[[int, int, Claim], Awaitable[None]], note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._channel, self._keys, self._spec, self._timeouts = channel, keys, spec, timeouts
        self._rank, self._lifetime_s = rank, lifetime_s
        self._now, self._run_now = now, run_now
        self._invoke, self._note = invoke, note
        self.latest_iteration: Callable[[int], Awaitable[int | None]] | None = None
        """Of the collective: how far a rank has come, where that can be told without waiting for it."""
        self.seen: dict[int, int] = {}
        """By rank, what `latest_iteration` said at the last look. An invocation tells its successor, which then needs one wait in vain, not two:
        where iterations take long, a lifetime has no room for two."""
        self.launching = asyncio.Lock()
        """Held from a claim until what was claimed is launched: whoever leaves in between has killed a rank."""
        self._looking = asyncio.Lock()
        self._looked: dict[int, tuple[float, bool]] = {}
        """By rank, when it was looked for last, and whether it had come further."""
        self._ahead: dict[tuple[int, int], float] = {}
        """Attempts whose claim is of the future, and when that was first seen."""

    async def replace(self, rank: int, iteration: int, *, missed: str | None = None) -> None:
        """Replaces a rank that is late with an iteration, unless it deserves more time.

        Args:
            rank, iteration: of what is missed.
            missed: its key; None: it is not known.

        Raises:
            ReplacementsFailed: replacing does not help, or the run has used up its replacements.
        """
        latest = await fencing.latest_attempt(self._channel, self._keys, rank)
        claim = await fencing.claimed(self._channel, self._keys, rank, latest)
        # What its checkpoint counts on is gone, and it does not know: it would wait for us, and we for it.
        told = claim is not None and claim.not_after is not None and claim.not_after <= iteration
        astray = not told and await self._is_past(rank, iteration)
        if not astray and (await self.goes_on(rank) or not self._is_silent(rank, iteration)):
            return
        if claim is not None and not astray and self._age_s(rank, latest, claim) < self._grace_s(claim, iteration):
            return  # it has just been replaced, and has to start and repeat some iterations
        tries = 0 if claim is None else claim.tries_at(iteration)
        if tries >= MOST_TRIES and claim is not None and claim.not_after == iteration:
            raise ReplacementsFailed(
                f"it has not delivered the iteration after {tries} replacements", rank=rank, attempt=latest,
                iteration=iteration,
            )  # fmt: skip
        if missed is not None and await self._channel.fetch(missed) is not None:
            return  # it came while we looked
        await self.check_left(rank, iteration)
        new = Claim(at_s=self._run_now(), not_after=iteration, tries=tries + 1)
        async with self.launching:
            if not await fencing.claim(self._channel, self._keys, rank, latest + 1, new):
                return
            await self.spend(rank, iteration)
            self._note(
                f"rank {self._rank} waited in vain for rank {rank} at iteration {iteration} and replaces it" if rank != self._rank
                else f"rank {rank}: what it had sent of iteration {iteration} is lost; its replacement sends it again"
            )  # fmt: skip
            # A checkpoint behind that iteration is of no use: what is missing was put before it, and lost.
            await self._invoke(rank, latest + 1, new)

    async def check_left(self, rank: int, iteration: int) -> None:
        """Raises `ReplacementsFailed` if the run has used up its replacements."""
        await fencing.check_left(
            self._channel, self._keys, self._spec.most_replacements, rank=rank, iteration=iteration
        )

    async def spend(self, rank: int, iteration: int) -> None:
        """Takes one of the run's replacements.

        Raises:
            ReplacementsFailed: there are none left.
        """
        await fencing.spend(self._channel, self._keys, self._spec.most_replacements, rank=rank, iteration=iteration)

    def _is_silent(self, rank: int, iteration: int) -> bool:
        """Whether a rank has been silent for too long, or kept this invocation and those before it waiting for so long."""
        silent_s = self._timeouts.silent_s(rank, self._now())
        if silent_s is None:
            return True
        if (rank, iteration) in self._timeouts.before_s:
            silent_s = max(silent_s, self._timeouts.waited_s(rank, iteration, self._now()))
        return silent_s >= 0.9 * self._timeouts.late_after_s(rank, within_s=self._within_s())

    def _patience_s(self) -> float:
        """However little is left of our own life."""
        return min(self._timeouts.usual_s(), self._within_s())

    def _within_s(self) -> float:
        return self._timeouts.within_s(lifetime_s=self._lifetime_s, cold_start_s=self._spec.cold_start_s)

    async def goes_on(self, rank: int) -> bool:
        """Whether a rank has come further since the last look, of a predecessor if need be, or since the beginning of the run.

        Looks that several waits make at about the same time are one.
        """
        async with self._looking:
            return await self._look(rank)

    async def _look(self, rank: int) -> bool:
        looked, now = self._looked.get(rank), self._now()
        if looked is not None and now - looked[0] < 0.5 * self._patience_s():
            return looked[1]
        latest = None if self.latest_iteration is None else await self.latest_iteration(rank)
        if latest is None:
            return False
        iterations, self.seen[rank] = latest - self.seen.get(rank, -1), latest
        further = iterations > 0
        if further:
            self._timeouts.seen(rank, now, iterations=iterations)
        self._looked[rank] = (now, further)
        return further

    def _age_s(self, rank: int, attempt: int, claim: Claim) -> float:
        """Seconds since a claim was made; since it was first seen, where the clock that it was made by is ahead of ours."""
        age_s = self._run_now() - claim.at_s
        return age_s if age_s >= 0 else self._now() - self._ahead.setdefault((rank, attempt), self._now())

    def _grace_s(self, claim: Claim, iteration: int) -> float:
        """Seconds that an attempt may take to start, and to come to an iteration from its checkpoint, within one life.

        Without this, workers that live hardly longer than that would replace each other for ever.
        """
        patience_s = self._patience_s()
        known = self._timeouts.typical_s or self._timeouts.slowest_s or patience_s
        back = 0 if claim.not_after is None else max(0, iteration - claim.not_after)
        repeated = (2 * self._spec.configuration.checkpoint_every + back) * known
        catching_up = min(self._lifetime_s, self._spec.cold_start_s + repeated)
        return float(max(0.9 * patience_s * 2**claim.tries, catching_up))

    async def _is_past(self, rank: int, iteration: int) -> bool:
        """Whether a rank has a checkpoint behind an iteration. Lists: somebody has waited in vain."""
        saved = await self._channel.list(self._keys.states(rank))
        return any(key > self._keys.state(rank, iteration) for key in saved)
