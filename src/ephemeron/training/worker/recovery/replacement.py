"""Replacement of failed peers: observes them, asks the failure detector, and launches their next attempts.

A rank is replaced at most `MOST_TRIES` times for one iteration, and the run replaces at most `max_replacements` functions. Each
replacement takes a number by a create-only put, so the limit holds with and without a client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.errors import ReplacementsFailed
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.failure_detector import FailureDetector
from ephemeron.training.worker.recovery.fencing import Claim

_log = logging.getLogger(__name__)

MOST_TRIES = 5
"""Replacements of a rank for one iteration before the run fails."""


class PeerReplacement:
    """Replaces peers on behalf of one rank.

    Args:
        channel: of the run.
        keys: of the run.
        detector: decides which peers have failed.
        rank: of this worker.
        most: replacements of the whole run.
        now: loop time.
        run_now: seconds since the launch of the run.
        invoke: starts an attempt of a rank with the arguments in a claim.
        warn: shows a warning to the user.
    """

    def __init__(
        self,
        channel: Channel,
        keys: Keys,
        detector: FailureDetector,
        *,
        rank: int,
        most: int,
        now: Callable[[], float],
        run_now: Callable[[], float],
        invoke: Callable[[int, int, Claim], Awaitable[None]],
        warn: Callable[[str], None],
    ) -> None:
        self._channel, self._keys, self._detector, self._rank, self._most = channel, keys, detector, rank, most
        self._now, self._run_now, self._invoke, self._warn = now, run_now, invoke, warn
        self.latest_iteration: Callable[[int], Awaitable[int | None]] | None = None
        """`Collective.latest_iteration`."""
        self.is_gone: Callable[[int, int], bool] = lambda rank, attempt: False
        """Whether an attempt of a rank is known to be dead: see `Mesh.is_gone`."""
        self.launching = asyncio.Lock()
        """Held from the claim of an attempt until its launch. An invocation that ended in between would leave a rank without
        any attempt."""
        self._observing = asyncio.Lock()

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
        if not astray and not self.is_gone(rank, latest):
            if await self.has_progressed(rank) or not self._detector.is_silent(rank, iteration, self._now()):
                return
            if claim is not None and self._detector.is_starting(rank, latest, claim, iteration, now_s=self._now(), run_s=self._run_now()):
                return  # it has just been replaced, and has to start and repeat some iterations
        tries = 0 if claim is None else claim.tries_at(iteration)
        if tries >= MOST_TRIES and claim is not None and claim.not_after == iteration:
            raise ReplacementsFailed(
                f"it has not delivered the iteration after {tries} replacements", rank=rank, attempt=latest, iteration=iteration
            )
        if missed is not None and await self._channel.fetch(missed) is not None:
            return  # it has arrived meanwhile
        await fencing.check_left(self._channel, self._keys, self._most, rank=rank, iteration=iteration)
        new = Claim(at_s=self._run_now(), not_after=iteration, tries=tries + 1)
        async with self.launching:
            if not await fencing.claim(self._channel, self._keys, rank, latest + 1, new):
                return
            await self.spend(rank, iteration)
            self._warn(
                f"rank {self._rank} waited in vain for rank {rank} at iteration {iteration} and replaces it"
                if rank != self._rank
                else f"rank {rank}: what it had sent of iteration {iteration} is lost; its replacement sends it again"
            )
            # The claim excludes later checkpoints: the missing object was put before them, and lost.
            await self._invoke(rank, latest + 1, new)
            _log.info("invoked attempt %d of rank %d", latest + 1, rank)

    async def spend(self, rank: int, iteration: int) -> None:
        """Takes one of the run's replacements.

        Raises:
            ReplacementsFailed: there are none left.
        """
        await fencing.spend(self._channel, self._keys, self._most, rank=rank, iteration=iteration)

    async def has_progressed(self, rank: int) -> bool:
        """Whether a rank has made progress: see `FailureDetector.observe`. Waits that time out together share one observation."""
        async with self._observing:
            now = self._now()
            known = self._detector.recent_observation(rank, now)
            if known is not None:
                return known
            latest = None if self.latest_iteration is None else await self.latest_iteration(rank)
            return latest is not None and self._detector.observe(rank, latest, now)

    async def _is_past(self, rank: int, iteration: int) -> bool:
        """Whether a rank has a checkpoint after an iteration. Lists keys: only for waits that have timed out."""
        saved = await self._channel.list(self._keys.states(rank))
        return any(key > self._keys.state(rank, iteration) for key in saved)
