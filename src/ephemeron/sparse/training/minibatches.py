"""Which rows form which step of which function: arithmetic on the sizes of partitions, the seed and the epoch.

An epoch has the partitions in a random order and the rows of each in a random order, cut into minibatches. Each function has a run of
neighbouring minibatches, so that it reads hardly more partitions than its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Minibatch(NamedTuple):
    """One step of one function."""

    step: int
    """Number among the steps of this function, over all epochs."""
    epoch: int
    partition: int
    start: int
    """First and last + 1 of the places in the epoch's order of the partition's rows."""
    stop: int
    last: bool = False
    """Whether it is the function's last one of the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The minibatches of a run."""

    rows: tuple[int, ...]
    """Of each partition."""
    batch_size: int
    epochs: int
    workers: int
    seed: int = 0

    def epoch(self, epoch: int, rank: int) -> Sequence[tuple[int, int, int]]:
        """Partition, start and stop of a function's minibatches of an epoch, in their order."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        every = [
            (int(p), start, min(start + self.batch_size, self.rows[p])) for p in order for start in range(0, self.rows[p], self.batch_size)
        ]
        first, stop = (len(every) * r // self.workers for r in (rank, rank + 1))
        return every[first:stop]

    def steps(self, rank: int, after: int = 0) -> Iterator[Minibatch]:
        """Minibatches of a function from a step on."""
        step = 0
        for epoch in range(self.epochs):
            parts = self.epoch(epoch, rank)
            for number, (partition, start, stop) in enumerate(parts, 1):
                if step >= after:
                    yield Minibatch(step, epoch, partition, start, stop, number == len(parts))
                step += 1

    def per_epoch(self, rank: int) -> int:
        """Steps of a function in each epoch."""
        total = sum(-(-rows // self.batch_size) for rows in self.rows)
        return total * (rank + 1) // self.workers - total * rank // self.workers

    def count(self, rank: int) -> int:
        """Steps of a function."""
        return self.epochs * self.per_epoch(rank)

    def order(self, epoch: int, partition: int) -> NDArray[np.int64]:
        """Rows of a partition in their order of an epoch."""
        return np.random.default_rng([self.seed, epoch, partition]).permutation(self.rows[partition])
