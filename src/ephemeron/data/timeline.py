"""Epochs and iterations of a run whose number of functions, or whose batches, may change. Pure.

A *generation* is a part of a run with fixed functions and batches (`training.job.generation`). Its first epoch may be one that an
earlier generation has begun: then the samples that are left of it are divided by the new batches, so that each sample is
still used once per epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ephemeron.data.split import SampleSplit


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
