"""Where an attempt after the first one goes on: the state of live peers, or a checkpoint of its own."""

from __future__ import annotations

from dataclasses import dataclass

from ephemeron.training.worker.invocation import InvocationContext, InvocationExit, NextGeneration
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.checkpoint import Checkpoint, Checkpoints, newest_common
from ephemeron.training.worker.recovery.peer_recovery import GoBack, OwnCheckpoint, PeerRecovery, PeerState, recovers_live
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.private_copies import PrivateCopies
from ephemeron.training.worker.trainers.trainer import Trainer

CHECK_EVERY_S = 1.0
"""Interval at which a rank that waits for its peers checks whether the run or its generation is over."""


@dataclass(slots=True, kw_only=True)
class RestoredState:
    """State of a rank between two iterations."""

    checkpoint: Checkpoint | None = None
    """None: the run, or the generation, begins here."""
    replaying: bool = False
    """Peers may be ahead: versions from here on may exist already."""
    peers: PeerState | None = None
    """What came from live peers, `checkpoint` included; None: nothing."""
    copies: PrivateCopies | None = None
    """What the predecessor has kept for other ranks; None: not known."""

    def load(self, trainer: Trainer) -> None:
        """Restores the trainer's state."""
        if self.checkpoint is None:
            return
        own = None if self.peers is None else self.peers.private
        trainer.load(self.checkpoint.trainer, self.checkpoint.meta.trainer, shared=own is not None)
        if own is not None:
            trainer.load_private(*own)

    @property
    def evaluates(self) -> bool:
        """Whether the evaluation before the next iteration is still to be done by this rank."""
        if self.peers is not None:
            return self.peers.evaluates
        return self.checkpoint is not None and not self.checkpoint.meta.evaluated

    @property
    def evaluated(self) -> bool:
        """Whether what follows from the evaluation before the next iteration is in the state already."""
        return self.peers.evaluated if self.peers is not None else not self.evaluates

    @property
    def exchanged(self) -> bool:
        """Whether the exchange with other groups before the next iteration is in the state already, or none is due."""
        if self.peers is not None:
            return self.peers.exchanged
        return self.checkpoint is None or self.checkpoint.meta.exchanged


def peer_recovery(invocation: InvocationContext, spec: RunSpec, copies: PrivateCopies | None = None) -> PeerRecovery | None:
    """This invocation's part in the recovery of its peers, and its own; None: all that is exchanged is in a store."""
    if invocation.direct is None or not invocation.direct.in_memory:
        return None
    return PeerRecovery(
        invocation.direct.mesh, owners=spec.configuration.aggregators, beginning=spec.current_generation.from_iteration, copies=copies
    )


async def recovered_state(
    lifecycle: InvocationLifecycle, checkpoints: Checkpoints, trainer: Trainer, recovery: PeerRecovery | None
) -> RestoredState:
    """State of a rank whose predecessor has not handed it over.

    Raises:
        InvocationExit: the run has ended meanwhile.
        NextGeneration: the next generation has begun.
    """
    if lifecycle.back is not None:
        return RestoredState(checkpoint=await checkpoints.newest(lifecycle.back), replaying=True)
    if recovery is None:
        return RestoredState(checkpoint=await checkpoints.newest(lifecycle.not_after), replaying=True)
    saved = await checkpoints.stored()
    recovery.common.stored(saved)
    found = await recovery.recover(
        live=recovers_live(lifecycle.spec, trainer), saved=saved, timeout_s=lifecycle.wait_timeout_s, check=_RunCheck(lifecycle)
    )
    match found:
        case PeerState():
            checkpoints.take_over(saved)
            return RestoredState(checkpoint=found.shared, replaying=True, peers=found)
        case OwnCheckpoint():
            not_after: int | None = found.iteration
        case GoBack():
            not_after = await newest_common(
                lifecycle.channel,
                lifecycle.keys,
                ranks=lifecycle.spec.configuration.workers,
                beginning=lifecycle.spec.current_generation.from_iteration,
            )
            if found.tells:
                lifecycle.invocation.warn(
                    f"rank {lifecycle.rank}: no rank that lives has its state; all go back to the checkpoint of iteration {not_after}"
                )
                recovery.tell_back(not_after)
        case None:
            not_after = lifecycle.not_after
    return RestoredState(checkpoint=await checkpoints.newest(not_after), replaying=True)


class _RunCheck:
    """Check, from time to time, whether a rank that asks its peers is still needed."""

    def __init__(self, lifecycle: InvocationLifecycle) -> None:
        self._lifecycle, self._checked = lifecycle, lifecycle.now()

    async def __call__(self) -> None:
        lifecycle = self._lifecycle
        if lifecycle.now() - self._checked < CHECK_EVERY_S:
            return
        self._checked = lifecycle.now()
        if await lifecycle.channel.fetch(lifecycle.keys.result) is not None:
            raise InvocationExit("finished")
        latest = await fencing.latest_begun(lifecycle.channel, lifecycle.keys)
        if latest > lifecycle.keys.generation:
            raise NextGeneration(latest)
