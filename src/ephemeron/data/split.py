"""Shares of the training set for ranks with different batch sizes (FasDL, section 4.2).

Aggregators spend time on aggregating, so they get smaller batches. If every rank had equally many samples, those with the larger
batch would end their epoch early. FasDL divides the samples in proportion to the batch sizes, so that all ranks end together:

    B^g = Σ B_r                  (3-14)   global batch; K aggregators of B^a and W-K others of B^n
    I   = D / B^g                (3-17)   iterations per epoch, rounded up
    D_r = D · B_r / B^g          (4-3 for aggregators, 4-4 for the others)

Equation 4-4 is printed with B^n·K in its denominator; the text and 4-3 show that B^a·K is meant.

D·B_r/B^g is rarely whole. A rank owns its full batches, and the remainder of D (less than one global batch) is
shared by largest remainders, so each rank is off by less than one sample, none exceeds its batch size, and the last
iteration is the only partial one. In it a rank may have no samples at all; weighting by samples keeps that unbiased.
Where a small batch does harm (batch statistics of one sample), it is dropped, or merged with the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ephemeron.data.shuffle import Indices, Purpose, permutation
from ephemeron.errors import JobError

LastBatch = Literal["keep", "drop", "merge"]


@dataclass(frozen=True, slots=True)
class SampleSplit:
    """Number of samples that each rank owns, and that it uses in each iteration."""

    samples: int
    """D: size of the whole training set."""
    batches: tuple[int, ...]
    """Batch size of each rank."""
    counts: tuple[int, ...]
    """Samples owned by each rank; they add up to `samples`."""
    last: LastBatch = "keep"
    """Treatment of the partial iteration: it is kept, dropped (other samples in each epoch), or merged with the one before it,
    which is then the last and the largest."""

    @property
    def global_batch(self) -> int:
        """B^g: samples per full iteration over all ranks."""
        return sum(self.batches)

    @property
    def iterations(self) -> int:
        """Iterations per epoch, the same for every rank. The last one may be partial."""
        if self.last == "keep":
            return -(-self.samples // self.global_batch)
        full = self.samples // self.global_batch
        return full if self.last == "drop" else max(min(1, self.samples), full)

    def batch_at(self, rank: int, iteration_in_epoch: int) -> int:
        """Number of samples that a rank uses in an iteration: its batch size, or less (merged: more) in the last iteration.

        Raises:
            IndexError: there is no such rank or no such iteration.
        """
        if not 0 <= rank < len(self.batches):
            raise IndexError(f"rank {rank} is not in 0 … {len(self.batches) - 1}")
        if not 0 <= iteration_in_epoch < self.iterations:
            raise IndexError(f"iteration {iteration_in_epoch} is not among the {self.iterations} of an epoch")
        batch = self.batches[rank]
        rest = self.counts[rank] - iteration_in_epoch * batch
        return rest if self.last == "merge" and iteration_in_epoch == self.iterations - 1 else min(batch, rest)


def plan_split(samples: int, batches: Sequence[int], *, last: LastBatch = "keep") -> SampleSplit:
    """Divides `samples` among ranks in proportion to the batch sizes.

    Args:
        samples: size of the training set; may be less than the number of ranks.
        batches: batch size of each rank, by rank.
        last: treatment of the partial iteration.

    Raises:
        JobError: there are no ranks, a batch size is below 1, `samples` is negative, or all of them would be dropped.
    """
    return _planned(samples, tuple(batches), last)


@lru_cache(maxsize=64)  # asked for several times in each iteration
def _planned(samples: int, batches: tuple[int, ...], last: LastBatch) -> SampleSplit:
    if not batches:
        raise JobError("there are no ranks to split samples among", remedy="use at least one worker")
    if samples < 0:
        raise JobError(f"samples = {samples} is below 0")
    for rank, batch in enumerate(batches):
        if batch < 1:
            raise JobError(f"batch size of rank {rank} is {batch}", remedy="use at least 1")
    if last == "drop" and 0 < samples < sum(batches):
        raise JobError(
            f"last_batch = 'drop' leaves nothing of {samples} samples, which are less than one global batch of {sum(batches)}",
            remedy="use smaller batches, fewer workers, or last_batch = 'merge'",
        )
    full, remainder = divmod(samples, sum(batches))
    shares = _largest_remainder(remainder, batches)
    counts = tuple(full * batch + share for batch, share in zip(batches, shares, strict=True))
    return SampleSplit(samples=samples, batches=batches, counts=counts, last=last)


def assign(samples: int, split: SampleSplit, seed: int) -> list[Indices]:
    """The samples that each rank owns: a seeded permutation of all, divided by `split.counts`.

    Returns:
        For each rank the indices into the whole training set, of length `split.counts[rank]`; together they hold
        every index once.

    Raises:
        ValueError: the split was made for another number of samples.
    """
    if samples != split.samples:
        raise ValueError(f"{samples} samples do not match a split of {split.samples}")
    order = permutation(samples, seed=seed, purpose=Purpose.ASSIGNMENT)
    return np.split(order, np.cumsum(split.counts)[:-1])


def held_out(count: int, fraction: float, *, seed: int) -> tuple[Indices, Indices]:
    """Indices of the samples for training and for testing, each in ascending order: a seeded share, rounded, is held out.

    At least one sample stays for training.
    """
    size = min(round(count * fraction), max(count - 1, 0))
    order = permutation(count, seed=seed, purpose=Purpose.HOLDOUT)
    return np.sort(order[size:]), np.sort(order[:size])


def _largest_remainder(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `total` < Σ weights, in proportion to the weights and none above its own.

    Each exact share total·w/Σ is below w. Only shares that are not whole are rounded up, so none passes w.
    """
    whole = sum(weights)
    shares = [total * w // whole for w in weights]
    by_fraction = sorted(range(len(weights)), key=lambda r: (-(total * weights[r] % whole), r))
    for rank in by_fraction[: total - sum(shares)]:
        shares[rank] += 1
    return shares
