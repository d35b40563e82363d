"""Failure detector of all patterns: replaces a peer that has been silent for too long.

The collective finds the late peer (a contribution or a shard is missing, a parameter server has no push of a rank); between
stages the wait-for graph does (`wait_for_graph`). This module decides whether the peer is replaced:

- not before it has been silent for longer than its timeout (`timeouts`);
- not while it makes progress, in runs whose ranks do not wait for each other;
- not while its latest attempt may still be starting or repeating iterations. The time for that doubles with each replacement
  that did not help. Claims carry the number of such replacements, so that every rank knows it;
- at most `MOST_TRIES` times for one iteration, and `max_replacements` times in the whole run. Each replacement takes a
  number by a create-only put, so the limit holds with and without a client.
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
"""Replacements of a rank for one iteration before the run fails."""


class FailureDetector:
    """One rank's decisions about silent peers.

    Args:
        channel, keys, spec: of the run.
        timeouts: iteration times and progress of peers.
        rank: of this worker.
        lifetime_s: function timeout.
        now: loop time.
        run_now: seconds since the launch of the run.
        invoke: starts an attempt of a rank with the arguments in a claim.
        note: shows a warning to the user.
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
        """`Collective.latest_iteration`."""
        self.progress_seen: dict[int, int] = {}
        """By rank: latest iteration at the last observation. A successor gets it, and so needs one timed-out wait instead of
        two to see that a peer makes no progress; an invocation may be too short for two."""
        self.launching = asyncio.Lock()
        """Held from the claim of an attempt until its launch. An invocation that ended in between would leave a rank without
        any attempt."""
        self._observing = asyncio.Lock()
        self._observed: dict[int, tuple[float, bool]] = {}
        """By rank: time of the last observation, and whether the rank had made progress."""
        self._ahead: dict[tuple[int, int], float] = {}
        """By rank and attempt: when a claim with a time in the future was first read."""

    async def replace(self, rank: int, iteration: int, *, missed: str | None = None) -> None:
        """Replaces a late rank, unless it may take more time.

        Args:
            rank: the late rank.
            iteration: of the missing object.
            missed: key of the missing object; None: not known.

        Raises:
            ReplacementsFailed: replacing does not help, or the run has used up its replacements.
        """
        latest = await fencing.latest_attempt(self._channel, self._keys, rank)
        claim = await fencing.claimed(self._channel, self._keys, rank, latest)
        # The rank has a checkpoint after an iteration of which an object is lost, and does not know: both would wait.
        told = claim is not None and claim.not_after is not None and claim.not_after <= iteration
        astray = not told and await self._is_past(rank, iteration)
        if not astray and (await self.has_progressed(rank) or not self._is_silent(rank, iteration)):
            return
        if (
            claim is not None
            and not astray
            and self._age_s(rank, latest, claim) < self._grace_s(rank, claim, iteration)
        ):
            return  # it has just been replaced, and has to start and repeat some iterations
        tries = 0 if claim is None else claim.tries_at(iteration)
        if tries >= MOST_TRIES and claim is not None and claim.not_after == iteration:
            raise ReplacementsFailed(
                f"it has not delivered the iteration after {tries} replacements", rank=rank, attempt=latest,
                iteration=iteration,
            )  # fmt: skip
        if missed is not None and await self._channel.fetch(missed) is not None:
            return  # it has arrived meanwhile
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
            # The claim excludes later checkpoints: the missing object was put before them, and lost.
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
        """Whether a rank has been silent, or this invocation and its predecessors have waited for it, for its timeout."""
        silence_s = self._timeouts.silence_s(rank, self._now())
        if silence_s is None:
            return True
        if (rank, iteration) in self._timeouts.waited_before_s:
            silence_s = max(silence_s, self._timeouts.waited_s(rank, iteration, self._now()))
        return silence_s >= 0.9 * self._timeouts.peer_timeout_s(rank, limit_s=self._limit_s())

    def _timeout_s(self) -> float:
        """Timeout, independent of the time that this invocation has left."""
        return min(self._timeouts.timeout_s(), self._limit_s())

    def _limit_s(self) -> float:
        return self._timeouts.limit_s(lifetime_s=self._lifetime_s, cold_start_s=self._spec.cold_start_s)

    async def has_progressed(self, rank: int) -> bool:
        """Whether a rank has finished iterations since the last observation, or since the start of the run at the first one.

        Waits that time out together share one observation. A predecessor's observation counts as this invocation's.
        """
        async with self._observing:
            return await self._observe(rank)

    async def _observe(self, rank: int) -> bool:
        observed, now = self._observed.get(rank), self._now()
        if observed is not None and now - observed[0] < 0.5 * self._timeout_s():
            return observed[1]
        latest = None if self.latest_iteration is None else await self.latest_iteration(rank)
        if latest is None:
            return False
        iterations, self.progress_seen[rank] = latest - self.progress_seen.get(rank, -1), latest
        if iterations > 0:
            self._timeouts.record_progress(rank, now, iterations=iterations)
        self._observed[rank] = (now, iterations > 0)
        return iterations > 0

    def _age_s(self, rank: int, attempt: int, claim: Claim) -> float:
        """Seconds since a claim was made; since it was first read, if the claimant's clock is ahead of this one."""
        age_s = self._run_now() - claim.at_s
        return age_s if age_s >= 0 else self._now() - self._ahead.setdefault((rank, attempt), self._now())

    def _grace_s(self, rank: int, claim: Claim, iteration: int) -> float:
        """Seconds that an attempt may take to start and to repeat iterations from its checkpoint, at most the function timeout.

        Without this time, workers whose function timeout is hardly longer would replace each other without end.
        """
        timeout_s = self._timeout_s()
        own_s = self._timeouts.typical_s or self._timeouts.slowest_s or timeout_s
        each_s = max(own_s, self._timeouts.iteration_s(rank))
        back = 0 if claim.not_after is None else max(0, iteration - claim.not_after)
        repeated = (2 * self._spec.configuration.checkpoint_every + back) * each_s
        catching_up = min(self._lifetime_s, self._spec.cold_start_s + repeated)
        return float(max(0.9 * timeout_s * 2**claim.tries, catching_up))

    async def _is_past(self, rank: int, iteration: int) -> bool:
        """Whether a rank has a checkpoint after an iteration. Lists keys: only for waits that have timed out."""
        saved = await self._channel.list(self._keys.states(rank))
        return any(key > self._keys.state(rank, iteration) for key in saved)
