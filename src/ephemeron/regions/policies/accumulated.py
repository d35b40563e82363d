"""Asynchronous SGD among regions (Cloudless-Training, 2.3, figure 5): `asgd` after every iteration, `asgd-ga` with gradients accumulated over f.

The regions exchange the change that their own optimisers have made since the last exchange. With SGD that is the learning rate times the
accumulated gradient, so adding it is the receiver's SGD step with that gradient, as published; with other optimisers their steps are
exchanged. The optimiser's state stays in its region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ephemeron.regions.policies.base import Arrays, Contribution, RegionPolicy


class AccumulatedGradients(RegionPolicy):
    """ASGD-GA(f): a region adds the accumulated steps of the others to its own parameters, as they arrive."""

    synchronous: ClassVar[bool] = False

    def __init__(self) -> None:
        self._base = np.zeros(0)
        """Parameters without the own steps since the last exchange."""

    def begin(self, parameters: np.ndarray) -> None:
        self._base = parameters.copy()

    def contribution(self, part: slice, own: np.ndarray) -> np.ndarray:
        change: np.ndarray = self._base[part] - own[part]
        return change

    def sent(self, part: slice, own: np.ndarray) -> None:
        self._base[part] = own[part]

    def merge(self, part: slice, own: np.ndarray, contributions: Sequence[Contribution], *, last: bool, late: float = 0.0) -> np.ndarray:
        merged = own[part].copy()
        for vector, _ in contributions:
            merged -= vector
            self._base[part] -= vector
        return merged

    def state(self) -> Arrays:
        return {"base": self._base.copy()}

    def load(self, arrays: Arrays) -> None:
        self._base = arrays["base"].copy()
