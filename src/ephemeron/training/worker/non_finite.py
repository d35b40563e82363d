"""Stops a run at the first number that is NaN or infinite: every iteration after it would be useless, and billed.

Three places cover all numbers: a rank's own batch (its loss and what it is about to send), a merged version before it is
applied (sums of finite numbers overflow), and the parameters before a checkpoint or the end. So no contribution, no
checkpoint and no result of a run that stops holds such a number, and a resume starts before it.

The cost is one pass over each vector, 0.3 ms per MB, which is little compared with packing it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ephemeron.data import assign
from ephemeron.errors import NonFiniteValue
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.trainer import TrainingStep

_NAMED = 8
"""Number of samples of a batch that a message names."""


def all_finite(vector: np.ndarray) -> bool:
    """Whether no element is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(float(vector.sum())):
            return True  # a NaN or an infinity would have made the sum one
    return bool(np.isfinite(vector).all())


def gaps(ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What disjoint ranges `start:stop` leave of `0:size`, ascending."""
    found, at = [], 0
    for start, stop in [*sorted(ranges), (size, size)]:
        if start > at:
            found.append((at, start))
        at = max(at, stop)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FiniteCheck:
    """Raises `NonFiniteValue` where the run's configuration says `stop`; otherwise checks nothing.

    Args:
        spec: of the run.
        rank: of this function.
        member: number of this rank among those that share the batch.
    """

    spec: RunSpec
    rank: int
    member: int

    def step(self, step: TrainingStep, iteration: int, checked: Sequence[tuple[int, int]] = ()) -> TrainingStep:
        """Checks and returns a rank's own contribution.

        Args:
            step: the contribution.
            iteration: that it belongs to.
            checked: ranges `start:stop` of elements that were checked already.
        """
        if self.stops:
            if not math.isfinite(step.loss):
                self._fail(f"the loss is {step.loss}", iteration)
            if not all(all_finite(step.vector[start:stop]) for start, stop in gaps(checked, step.vector.size)):
                self._fail(f"the loss is {step.loss:.6g}, but {self._exchanged} are not finite", iteration)
        return step

    def merged(self, vector: np.ndarray, version: int) -> np.ndarray:
        """Checks and returns the update of one version, before it is applied."""
        if self.stops and not all_finite(vector):
            raise NonFiniteValue(
                f"the merged {self._exchanged} are not finite, though each rank's were: their sum overflows",
                rank=self.rank,
                iteration=version,
            )
        return vector

    def parameters(self, vector: np.ndarray, iteration: int) -> None:
        """Checks the model, before it is saved."""
        if self.stops and not all_finite(vector):
            raise NonFiniteValue(
                "parameters are not finite after an optimizer step with finite gradients", rank=self.rank, iteration=iteration - 1
            )

    @property
    def stops(self) -> bool:
        """Whether the run stops at such a number."""
        return self.spec.configuration.on_non_finite == "stop"

    @property
    def _exchanged(self) -> str:
        return self.spec.configuration.exchanged

    def _fail(self, what: str, iteration: int) -> None:
        raise NonFiniteValue(what, rank=self.rank, iteration=iteration, batch=self.batch_text(iteration))

    def batch_text(self, iteration: int) -> str:
        """Text such as `epoch 0, batch 7 of 10: 16 training samples 12, 40, …`, numbered as in the data source."""
        spec = self.spec
        place = spec.timeline.place(iteration)
        where = f"epoch {place.epoch}, batch {place.iteration} of {place.split.iterations}"
        if spec.script is not None:  # which samples its loader has drawn is not known here
            return where
        order = assign(spec.samples, spec.split, spec.seed)
        owned = np.concatenate(order) if spec.samples_globally else order[self.member]
        samples = owned[spec.sampler(self.member).batch(iteration)]
        named = ", ".join(map(str, samples[:_NAMED].tolist())) + (", …" if len(samples) > _NAMED else "")
        return f"{where}: {len(samples)} training samples {named}"
