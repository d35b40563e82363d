"""The samples that an iteration uses: a pure function of seed, rank, epoch and iteration.

No generator advances, so the position in the data is no state: a function that is replaced, continued by a hand-off or started twice
needs only its iteration number to continue exactly where its predecessor was, and each sample is used once per epoch whichever
functions died in between.

The same functions give a single worker the global batch that W workers use together (`global_batch`), for the control experiment
"W workers under BSP equal one worker".

Epochs and iterations of a run whose number of functions, or whose batches, may change. Pure.

A *generation* is a part of a run with fixed functions and batches (`training.job.generation`). Its first epoch may be one that an
earlier generation has begun: then the samples that are left of it are divided by the new batches, so that each sample is
still used once per epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


def global_batch(split: SampleSplit, assignment: Sequence[Indices], epoch: int, iteration_in_epoch: int, *, seed: int) -> Indices:
    """The samples that all ranks use in one iteration, in rank order, as indices into the whole training set.

    Args:
        assignment: result of `assign` for this split.
    """
    parts = [owned[batch_indices(split, rank, epoch, iteration_in_epoch, seed=seed)] for rank, owned in enumerate(assignment)]
    return np.concatenate(parts)


class Sampler:
    """`batch_indices` by global iteration number; remembers the order of the last epoch it was asked for.

    Every rank shuffles a share of its own, so a global batch is made of one part of each share.

    Args:
        split: of the training set among ranks; or the timeline of a generation, which begins with an epoch.
        rank: of the samples.
        seed: of the job.

    Raises:
        IndexError: there is no such rank.
        ValueError: the training set is empty.
    """

    def __init__(self, split: SampleSplit | Timeline, rank: int, seed: int) -> None:
        self.timeline = _timeline(split, rank)
        if self.timeline.rest is not None:
            raise ValueError("shares of ranks can only change at the end of an epoch")
        self.split = self.timeline.split
        self.rank = rank
        self.seed = seed
        self._last: tuple[int, Indices] | None = None

    def batch(self, iteration: int) -> Indices:
        """Positions within the rank's own share for a global iteration number, counted from 0 over all epochs."""
        place = self.timeline.place(iteration)
        return _slice(self._order(place.epoch), self.split, self.rank, place.iteration)

    def _order(self, epoch: int) -> Indices:
        last = self._last
        if last is None or last[0] != epoch:
            count = self.split.counts[self.rank]
            last = self._last = (epoch, epoch_order(count, seed=self.seed, rank=self.rank, epoch=epoch))
        return last[1]


class GlobalSampler:
    """Samples of a rank where all ranks go through one order of the whole training set.

    A global batch is the next part of that order, cut among the ranks: which samples it holds does not depend on
    their number. With one rank it is the order of `Sampler`.

    Args:
        split: of the training set among ranks, or the timeline of a generation.
        rank: of the samples.
        seed: of the job.

    Raises:
        IndexError: there is no such rank.
        ValueError: the training set is empty.
    """

    def __init__(self, split: SampleSplit | Timeline, rank: int, seed: int) -> None:
        self.timeline = _timeline(split, rank)
        self.rank, self.seed = rank, seed
        self._last: tuple[int, Indices] | None = None

    def batch(self, iteration: int) -> Indices:
        """Positions within the whole training set for a global iteration number, counted from 0 over all epochs."""
        place, split = self.timeline.place(iteration), self.timeline.split
        if self._last is None or self._last[0] != place.epoch:
            order = epoch_order(split.samples, seed=self.seed, rank=0, epoch=place.epoch)
            self._last = (place.epoch, order)
        sizes = [place.split.batch_at(rank, place.iteration) for rank in range(self.rank + 1)]
        begin = self.timeline.used_before(iteration) + sum(sizes[:-1])
        return self._last[1][begin : begin + sizes[-1]]


def _timeline(split: SampleSplit | Timeline, rank: int) -> Timeline:
    timeline = Timeline(split=split) if isinstance(split, SampleSplit) else split
    if timeline.split.iterations == 0:
        raise ValueError("an empty training set has no batches")
    if not 0 <= rank < len(timeline.split.batches):
        raise IndexError(f"rank {rank} is not in 0 … {len(timeline.split.batches) - 1}")
    return timeline


def _slice(order: Indices, split: SampleSplit, rank: int, iteration_in_epoch: int) -> Indices:
    size = split.batch_at(rank, iteration_in_epoch)
    start = iteration_in_epoch * split.batches[rank]
    return order[start : start + size]


# -- epochs and iterations of a run whose number of functions -----------------------------------------------------


class Place(NamedTuple):
    """Place of an iteration in its epoch."""

    epoch: int
    iteration: int
    """Number within the epoch, or within what was left of it when the generation began."""
    split: SampleSplit
    """Of the epoch, or of what was left of it."""
    used: int
    """Samples of the epoch that earlier generations have used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Iterations of one generation, from its first to the end of the run."""

    split: SampleSplit
    """Of a whole epoch among the ranks."""
    first: int = 0
    """First iteration of the generation."""
    epoch: int = 0
    """Epoch of that iteration."""
    rest: SampleSplit | None = None
    """Of the samples that are left of that epoch, where an earlier generation has begun it."""

    @property
    def _whole(self) -> tuple[int, int]:
        """First iteration and epoch from which on epochs are whole."""
        if self.rest is None:
            return self.first, self.epoch
        return self.first + self.rest.iterations, self.epoch + 1

    def place(self, iteration: int) -> Place:
        """Place of an iteration of the generation, counted from 0 over all epochs."""
        whole, epoch = self._whole
        if iteration < whole and self.rest is not None:
            return Place(self.epoch, iteration - self.first, self.rest, self.split.samples - self.rest.samples)
        number, within = divmod(iteration - whole, self.split.iterations)
        return Place(epoch + number, within, self.split, 0)

    def epoch_of(self, iteration: int) -> int:
        """Epoch of an iteration; the number of epochs at the end of the run."""
        return self.place(iteration).epoch

    def starts_epoch(self, iteration: int) -> bool:
        """Whether an epoch begins with an iteration, or the run ends before it."""
        place = self.place(iteration)
        return place.iteration == 0 and place.used == 0

    def start_of(self, epoch: int) -> int:
        """First iteration of an epoch; of the generation's first epoch, the first one of the generation."""
        whole, number = self._whole
        return self.first if epoch <= self.epoch else whole + (epoch - number) * self.split.iterations

    def batch(self, rank: int, iteration: int) -> int:
        """Number of samples that a rank uses in an iteration."""
        place = self.place(iteration)
        return place.split.batch_at(rank, place.iteration)

    def used_before(self, iteration: int) -> int:
        """Samples of its epoch that have been used before an iteration, over all ranks."""
        place = self.place(iteration)
        return place.used + place.iteration * place.split.global_batch
