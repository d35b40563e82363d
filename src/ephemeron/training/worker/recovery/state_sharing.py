"""What a rank does for replacements of its peers, and for its own, at each point of the training loop.

On a channel that is not direct it does nothing. See `peer_recovery`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ephemeron.training.collectives import Collective
from ephemeron.training.worker.background import BackgroundTasks
from ephemeron.training.worker.recovery.checkpoint import CheckpointMeta
from ephemeron.training.worker.recovery.peer_recovery import PeerRecovery, recovers_live
from ephemeron.training.worker.startup import StartedWorker


class StateSharing:
    """State of one rank that others have or keep.

    Args:
        started: the worker at its start.
        describe: plain values of the state that all ranks share, without the trainer's.
    """

    def __init__(self, started: StartedWorker, describe: Callable[[], CheckpointMeta]) -> None:
        self._started, self._describe = started, describe
        self._lifecycle, self._trainer, self._spec = started.lifecycle, started.trainer, started.spec
        self._recovery = started.recovery
        self._collective: Collective | None = None
        self.live = self._recovery is not None and recovers_live(self._spec, self._trainer)
        """Whether replacements of lost ranks take the state of live ones."""
        self.evaluated_at = started.iteration if started.evaluated else -1
        """Iteration before which the last evaluation was done, with all that follows from it."""
        self.exchanging = False
        """Whether this rank waits for other groups, and its state lacks what they have given."""

    async def begin(self, collective: Collective, background: BackgroundTasks) -> None:
        """From now on replacements of other ranks can recover from this one."""
        recovery, started = self._recovery, self._started
        if recovery is None:
            return
        self._collective, invocation = collective, self._lifecycle.invocation
        await recovery.serve(
            self._trainer,
            started.status,
            describe=self._describe,
            evaluated=self._is_evaluated,
            exchanged=lambda: not self.exchanging,
            compute=lambda work: invocation.compute(work, samples=0),
        )
        if invocation.direct is not None:
            self._lifecycle.replacement.is_gone = invocation.direct.mesh.is_gone
        background.start("back", self._go_back_when_told(recovery))
        if self.live:
            self._lifecycle.is_left_behind = lambda: recovery.is_left_behind(started.status.applied)
        if started.iteration > started.beginning and self._trainer.shares_after_compute:
            self._publish(started.iteration, evaluated=not started.evaluates)

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Context in which the trainer is not used, and its state may be given to a replacement."""
        if self._recovery is None:
            yield
            return
        async with self._recovery.idle():
            yield

    async def before(self, iteration: int) -> None:
        """Before an iteration: keeps the state, if it cannot be had while this rank waits."""
        if self.live and self._recovery is not None and not self._trainer.shares_after_compute:
            arrays, meta = await self._lifecycle.invocation.compute(self._trainer.state, samples=0)
            self._recovery.keep(arrays, dataclasses.replace(self._describe(), trainer=meta))
            self._publish(iteration, evaluated=True)

    def submitted(self, iteration: int) -> None:
        """An iteration was computed, and its contribution is about to be sent."""
        if self.live and self._trainer.shares_after_compute:
            self._publish(iteration + 1, evaluated=False)

    def acknowledged(self, iteration: int) -> int:
        """Newest iteration up to which checkpoints may be superseded: not those that all ranks may have to go back to."""
        return iteration if self._recovery is None else min(iteration, self._recovery.common.iteration)

    def stored(self, iterations: list[int]) -> None:
        """This rank's checkpoints are those of these iterations."""
        if self._recovery is not None:
            self._recovery.common.stored(iterations)

    @property
    def hands_over(self) -> bool:
        """Whether a successor gets the state over a connection, and need not read it from the store."""
        return self._recovery is not None

    async def hand_over(self, data: bytes) -> bool:
        """Sends this rank's state to its successor; whether that has it."""
        if self._recovery is None:
            return False
        return await self._recovery.hand_over(self._lifecycle.attempt + 1, data)

    def _publish(self, iteration: int, *, evaluated: bool) -> None:
        if self.live and self._recovery is not None and self._collective is not None:
            self._recovery.publish(
                iteration,
                self._collective.private_arrays(),
                after_compute=self._trainer.shares_after_compute,
                evaluated=evaluated,
                spent_usd=self._lifecycle.spent_usd(),
            )

    def _is_evaluated(self) -> bool:
        """Whether the evaluation before the next iteration is done, as far as the state that all ranks share depends on it."""
        applied = self._started.status.applied
        decides = self._spec.shares_evaluations and self._spec.evaluates_at(applied)
        return not decides or self.evaluated_at >= applied

    async def _go_back_when_told(self, recovery: PeerRecovery) -> None:
        await self._lifecycle.go_back(await recovery.told_back())
