"""The samples that an iteration uses: a pure function of seed, rank, epoch and iteration.

No generator advances, so the position in the data is no state: a function that is replaced, continued by a hand-off or started twice
needs only its iteration number to continue exactly where its predecessor was, and each sample is used once per epoch whichever
functions died in between.

The same functions give a single worker the global batch that W workers use together (`global_batch`), for the control experiment
"W workers under BSP equal one worker".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ephemeron.data.shuffle import Indices, Purpose, permutation
from ephemeron.data.split import SampleSplit


def epoch_order(count: int, *, seed: int, rank: int, epoch: int) -> Indices:
    """The order in which a rank goes through its `count` samples in an epoch. See `ephemeron.data.shuffle`."""
    return permutation(count, seed=seed, purpose=Purpose.EPOCH, rank=rank, epoch=epoch)


def batch_indices(split: SampleSplit, rank: int, epoch: int, iteration_in_epoch: int, *, seed: int) -> Indices:
    """Positions within the rank's own share, of length `split.batch_at(rank, iteration_in_epoch)`.

    Raises:
        IndexError: there is no such rank or no such iteration.
    """
    return _slice(epoch_order(split.counts[rank], seed=seed, rank=rank, epoch=epoch), split, rank, iteration_in_epoch)


def global_batch(
    split: SampleSplit, assignment: Sequence[Indices], epoch: int, iteration_in_epoch: int, *, seed: int
) -> Indices:
    """The samples that all ranks use in one iteration, in rank order, as indices into the whole training set.

    Args:
        assignment: result of `assign` for this split.
    """
    parts = [
        owned[batch_indices(split, rank, epoch, iteration_in_epoch, seed=seed)] for rank, owned in enumerate(assignment)
    ]
    return np.concatenate(parts)


class Sampler:
    """`batch_indices` by global iteration number; remembers the order of the last epoch it was asked for.

    Args:
        split: of the training set among ranks.
        rank: of the samples.
        seed: of the job.

    Raises:
        IndexError: there is no such rank.
        ValueError: the training set is empty.
    """

    def __init__(self, split: SampleSplit, rank: int, seed: int) -> None:
        if split.iterations == 0:
            raise ValueError("an empty training set has no batches")
        if not 0 <= rank < len(split.batches):
            raise IndexError(f"rank {rank} is not in 0 … {len(split.batches) - 1}")
        self.split = split
        self.rank = rank
        self.seed = seed
        self._last: tuple[int, Indices] | None = None

    def batch(self, iteration: int) -> Indices:
        """Positions within the rank's own share for a global iteration number, counted from 0 over all epochs."""
        epoch, iteration_in_epoch = divmod(iteration, self.split.iterations)
        return _slice(self._order(epoch), self.split, self.rank, iteration_in_epoch)

    def _order(self, epoch: int) -> Indices:
        last = self._last
        if last is None or last[0] != epoch:
            count = self.split.counts[self.rank]
            last = self._last = (epoch, epoch_order(count, seed=self.seed, rank=self.rank, epoch=epoch))
        return last[1]


def _slice(order: Indices, split: SampleSplit, rank: int, iteration_in_epoch: int) -> Indices:
    size = split.batch_at(rank, iteration_in_epoch)
    start = iteration_in_epoch * split.batches[rank]
    return order[start : start + size]
