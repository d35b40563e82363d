"""Model averaging among regions (Cloudless-Training, 2.3, figure 6): `sma` with a barrier in every round, `ama` without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ephemeron.regions.policies.base import Contribution, RegionPolicy, weighted_mean


class SynchronousAverage(RegionPolicy):
    """SMA(f): all regions go on with the mean of their parameters, weighted by samples."""

    synchronous: ClassVar[bool] = True
    averages: ClassVar[bool] = True

    def begin(self, parameters: np.ndarray) -> None:
        return

    def contribution(self, part: slice, own: np.ndarray) -> np.ndarray:
        return own[part].copy()

    def merge(self, part: slice, own: np.ndarray, contributions: Sequence[Contribution], *, last: bool, late: float = 0.0) -> np.ndarray:
        return weighted_mean(contributions).astype(own.dtype) if contributions else own[part]


class AsynchronousAverage(RegionPolicy):
    """AMA(f): a region goes on with the mean of its own parameters and those that have arrived, each with the same weight."""

    synchronous: ClassVar[bool] = False
    averages: ClassVar[bool] = True

    def begin(self, parameters: np.ndarray) -> None:
        return

    def contribution(self, part: slice, own: np.ndarray) -> np.ndarray:
        return own[part].copy()

    def merge(self, part: slice, own: np.ndarray, contributions: Sequence[Contribution], *, last: bool, late: float = 0.0) -> np.ndarray:
        if not contributions:
            return own[part]
        return weighted_mean([Contribution(own[part], 1), *(Contribution(c.vector, 1) for c in contributions)]).astype(own.dtype)
