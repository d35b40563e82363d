"""Which positions of an epoch go to which rank and batch. Pure, and O(1) to resume.

An epoch is an order of all samples, drawn from seed and epoch alone. Its positions are consumed from the front: a step
takes the next `world_size · batch_size` of them, and every rank its part. What has been consumed is therefore one number,
however many ranks or loaders there were, and whoever resumes deals what is left anew among the ranks there are now.

Every rank has as many batches as the others. The last step may be smaller: its positions are spread evenly; if there are
fewer than ranks, they join the step before it, so that no batch is empty. `drop_last` leaves them out, `pad` fills the step
with the epoch's first samples (which are then delivered twice, and are the only ones that are).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from ephemeron.data.shuffle import Indices, Purpose, permutation
from ephemeron.errors import JobError

Remainder: TypeAlias = Literal["keep", "drop", "pad"]


@dataclass(slots=True, kw_only=True)
class Stream:
    """One rank's batches of one epoch after another.

    Raises:
        JobError: a number is out of range, or there are fewer samples than ranks and none may be dropped or padded.
    """

    samples: int
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    remainder: Remainder = "keep"
    epoch: int = 0
    consumed: int = 0
    """Positions of this epoch that all ranks together have taken."""
    _order: tuple[int, Indices] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise JobError(f"batch_size = {self.batch_size} should be at least 1")
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise JobError(f"rank {self.rank} of world_size {self.world_size}", remedy="ranks are 0 to world_size - 1")
        if 0 < self.samples < self.world_size and self.remainder == "keep":
            raise JobError(
                f"{self.samples} samples for {self.world_size} ranks would leave ranks without a batch",
                remedy="use fewer ranks, remainder='pad' or remainder='drop'",
            )

    @property
    def global_batch(self) -> int:
        """Positions that a full step takes."""
        return self.batch_size * self.world_size

    def steps_left(self) -> int:
        """Batches of this epoch that this rank has still to take; the same for every rank."""
        full, rest = divmod(self.samples - self.consumed, self.global_batch)
        if rest == 0 or self.remainder == "drop":
            return full
        return full if self._joins(full, rest) else full + 1

    def _joins(self, full: int, rest: int) -> bool:
        return self.remainder == "keep" and full > 0 and rest < self.world_size

    def next(self) -> Indices | None:
        """The samples of this rank's next batch, or None at the end of the epoch (then call `next_epoch`).

        Not empty, of `batch_size` samples but for the last one.
        """
        if self.steps_left() == 0:
            return None
        left = self.samples - self.consumed
        full, rest = divmod(left, self.global_batch)
        size = self.global_batch
        if full == 0 or (full == 1 and self._joins(full, rest)):
            size = left
        taken = self.order()[self.consumed : self.consumed + size]
        if self.remainder == "pad" and len(taken) < self.global_batch:
            taken = np.concatenate([taken, np.resize(self.order(), self.global_batch - len(taken))])
        self.consumed += size
        whole = len(taken) == self.global_batch
        if whole:
            return taken[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
        return np.array_split(taken, self.world_size)[self.rank]

    def next_epoch(self, epoch: int | None = None) -> None:
        """Begins another epoch, by default the following one."""
        self.epoch, self.consumed = self.epoch + 1 if epoch is None else epoch, 0

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

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the same for every rank that has taken as many batches."""
        return {
            "samples": self.samples, "seed": self.seed, "shuffle": self.shuffle, "epoch": self.epoch,
            "consumed": min(self.consumed, self.samples),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was called, perhaps with another batch size or number of ranks.

        Raises:
            JobError: the state is of other samples, another seed, or another order.
        """
        for key in ("samples", "seed", "shuffle"):
            if state.get(key) != getattr(self, key):
                raise JobError(
                    f"the state is of {key} = {state.get(key)!r}, this stream has {getattr(self, key)!r}",
                    remedy="resume with the dataset, seed and order that the state was saved with",
                )
        self.epoch, self.consumed = int(state["epoch"]), int(state["consumed"])
