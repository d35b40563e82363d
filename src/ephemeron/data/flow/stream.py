"""Positions of an epoch for each rank and batch. Pure, and O(1) to resume.

An epoch is an order of all samples, drawn from seed and epoch alone. Its positions are consumed from the front, as
`ephemeron.data.scheduler.EpochPartition` assigns them: step by step, a batch for every rank. The consumed positions are therefore
one number, for any number of ranks and loaders, and a resumed stream divides the rest among the ranks that there are then.

Indices that contain their epoch, and samples that contain their request, for frameworks that load batches.

Accelerate's `skip_first_batches`, with which Hugging Face's `Trainer` resumes, builds a `torch.utils.data.DataLoader`
from `loader.dataset` and `loader.batch_sampler`. Each index contains the epoch, so that its sample has the random
numbers of that epoch in any process that loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ephemeron.data.flow.collate import Collator
from ephemeron.data.flow.sample_loader import SampleRequest
from ephemeron.data.scheduler import EpochPartition, Remainder
from ephemeron.data.shuffle import Indices, Purpose, permutation
from ephemeron.errors import JobError


@dataclass(slots=True, kw_only=True)
class BatchStream:
    """One rank's batches of one epoch after another.

    Raises:
        JobError: a number is out of range, or there are fewer samples than ranks and none may be repeated or dropped.
    """

    samples: int
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    remainder: Remainder = "even"
    epoch: int = 0
    begun_at: int = 0
    """Positions of this epoch that had been taken when these ranks began."""
    steps: int = 0
    """Steps of this rank since then."""
    _order: tuple[int, Indices] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise JobError(f"batch_size = {self.batch_size} should be at least 1")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise JobError(f"rank {self.rank} of world_size {self.world_size}", remedy="ranks are 0 to world_size - 1")
        if 0 < self.samples < self.world_size and self.remainder == "keep":
            raise JobError(
                f"{self.samples} samples for {self.world_size} ranks would leave ranks without a batch",
                remedy="use fewer ranks, remainder='even', remainder='pad' or remainder='drop'",
            )
        self._deal()  # refuses an unknown rule

    def _deal(self) -> EpochPartition:
        return self._deal_of(self.samples - self.begun_at)

    def _deal_of(self, count: int) -> EpochPartition:
        return EpochPartition(count=count, batch=self.batch_size, world_size=self.world_size, remainder=self.remainder)

    @property
    def length(self) -> int:
        """Batches of a whole epoch; the same for every rank, and at every position."""
        return self._deal_of(self.samples).batches

    @property
    def share(self) -> int:
        """Samples of a whole epoch for this rank, including repeated ones."""
        deal = self._deal_of(self.samples)
        full = max(0, deal.batches - 2)  # only the last two may be smaller
        return full * self.batch_size + sum(len(deal.part(self.rank, step)) for step in range(full, deal.batches))

    @property
    def consumed(self) -> int:
        """Positions of this epoch that all ranks together have taken, if all have taken equally many batches."""
        if self.steps == 0:
            return self.begun_at
        return min(self.begun_at + self._deal().step(self.steps - 1).stop, self.samples)

    def steps_left(self) -> int:
        """Batches of this epoch left to this rank; the same for every rank."""
        return self._deal().batches - self.steps

    def next(self) -> Indices | None:
        """The samples of this rank's next batch, or None at the end of the epoch (then call `begin`).

        A batch has `batch_size` samples, except the last ones. It is empty only with `remainder = "keep"`, after
        resuming with fewer samples left than ranks, or with batches of one.
        """
        if self.steps_left() == 0:
            return None
        part = self._deal().part(self.rank, self.steps)
        self.steps += 1
        order = self.order()
        return order[(np.arange(part.start, part.stop) + self.begun_at) % max(1, self.samples)]

    @property
    def ordered(self) -> bool:
        """True if the order of an epoch is known when it begins."""
        return True

    def copy(self) -> BatchStream:
        """A copy at the same position."""
        return replace(self)

    def begin(self, epoch: int) -> BatchStream:
        """A stream at the beginning of an epoch, also if this one is not at its end."""
        return replace(self, epoch=epoch, begun_at=0, steps=0)

    def rest(self) -> Indices:
        """Samples of this epoch left to all ranks together, in order."""
        return self.order()[self.consumed :]

    def following(self) -> Indices:
        """The next epoch's order."""
        return self.begin(self.epoch + 1).order()

    def order(self) -> Indices:
        """All samples in this epoch's order; the same for all ranks."""
        if self._order is None or self._order[0] != self.epoch:
            order = (
                permutation(self.samples, seed=self.seed, purpose=Purpose.EPOCH, epoch=self.epoch)
                if self.shuffle
                else np.arange(self.samples)
            )
            self._order = (self.epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, object]:
        """The position as JSON; the same for every rank that has taken as many batches."""
        return {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle, "epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continues at a position of `state_dict`, also with another batch size or number of ranks.

        Raises:
            JobError: the state has other samples, another seed, or another order.
        """
        for key in ("samples", "seed", "shuffle"):
            if state.get(key) != getattr(self, key):
                raise JobError(
                    f"the state has {key} = {state.get(key)!r}, this stream has {getattr(self, key)!r}",
                    remedy="resume with the dataset, seed and order that the state was saved with",
                )
        epoch, consumed = state.get("epoch"), state.get("consumed")
        if not isinstance(epoch, int) or not isinstance(consumed, int) or epoch < 0 or not 0 <= consumed <= self.samples:
            raise JobError(
                f"the state has epoch = {epoch!r}, consumed = {consumed!r}, of {self.samples} samples",
                remedy="load a result of state_dict(), unchanged",
            )
        self.epoch, self.begun_at, self.steps = epoch, consumed, 0


# -- indices that contain their epoch -----------------------------------------------------------------------------


class EpochIndex(int):
    """A sample's place in a view, and the epoch in which it is requested."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type[EpochIndex], tuple[int, int]]:
        return EpochIndex, (int(self), self.epoch)


class LoadedSamples(list[Any]):
    """Samples of a view with their requests."""

    def __init__(self, samples: Iterable[Any], items: Sequence[SampleRequest]) -> None:
        super().__init__(samples)
        self.items = items


class SeededCollate:
    """A loader's collate function for other loaders of its batches: equal samples give equal batches."""

    def __init__(self, collator: Collator) -> None:
        self._collator = collator

    def __call__(self, samples: list[Any]) -> Any:
        return self._collator(samples, samples.items if isinstance(samples, LoadedSamples) else ())
