"""The port of policies: how a region's parameters take in what other regions have sent. Pure: arrays in, arrays out.

A policy has a state of its own (`state`, `load`), which a replacement restores. It never sees time, payloads or regions that are
late: `exchange` decides which contributions it is given, `schedule` when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Contribution(NamedTuple):
    """A region's part of one round, as all regions decode it."""

    vector: np.ndarray
    """1-D, of one fragment."""
    samples: int
    """Samples that the region has trained on since its round before: its weight."""


class RegionPolicy(ABC):
    """What one region sends and how it applies what arrives."""

    synchronous: ClassVar[bool]
    """Whether a round is applied as a whole, the region's own contribution included; else whatever has arrived of others."""
    averages: ClassVar[bool] = False
    """Whether contributions are parameters: the newest one of a region replaces those before, and rounding errors cannot be made up for."""

    @abstractmethod
    def begin(self, parameters: np.ndarray) -> None:
        """The parameters before the first iteration, alike in all regions; 1-D."""

    @abstractmethod
    def contribution(self, part: slice, own: np.ndarray) -> np.ndarray:
        """What this region sends of a fragment; a new array.

        Args:
            part: elements of the fragment.
            own: the region's parameters now, whole.
        """

    def sent(self, part: slice, own: np.ndarray) -> None:
        """The contribution of a fragment was sent; its rounding error is added to the next one by the sender."""
        return

    @abstractmethod
    def merge(self, part: slice, own: np.ndarray, contributions: Sequence[Contribution], *, last: bool, late: float = 0.0) -> np.ndarray:
        """The region's new parameters of a fragment.

        Args:
            part, own: as for `contribution`.
            contributions: of a round of all regions in their order, those of quarantined ones left out; or what has arrived of others.
            last: whether all regions have to have the same parameters afterwards.
            late: part of H that has passed since the round was sent.
        """

    def state(self) -> Arrays:
        """Arrays from which `load` restores this state."""
        return {}

    def load(self, arrays: Arrays) -> None:
        """Restores what `state` has returned."""
        return


def weighted_mean(contributions: Sequence[Contribution]) -> np.ndarray:
    """Mean of vectors, weighted by samples, in their order; float64."""
    total = np.zeros(contributions[0].vector.shape, dtype=np.float64)
    for vector, samples in contributions:
        total += vector.astype(np.float64) * samples
    total /= sum(samples for _, samples in contributions)
    return total
