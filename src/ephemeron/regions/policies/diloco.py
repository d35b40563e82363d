"""DiLoCo (Douillard et al., 2023) and its streaming form (Douillard et al., 2025): an outer optimiser for the mean change of all regions.

Every region sends how far its parameters have moved from the common ones, the outer gradient. SGD with Nesterov momentum applies the mean, and
all regions go on from the result. In the streaming form parameters are divided into fragments that are exchanged at different
iterations, so that the link is used evenly, and a round is applied `delay` iterations after it was sent, while the region trains on. Its
parameters then become `mixing` times its own and the rest the common ones (published: 0.5).

What a region has learned since it sent a round is in its own parameters only, so `mixing` decides how much of that counts, and how far regions stay
apart. Where it is not given, half of the H steps between two rounds count: H - delay of them whole, the `delay` steps after a round was sent by
`mixing`, so H - delay + mixing · delay = H / 2, and `mixing` is 0 where the delay is at most H / 2. See decision 0042.

The steps of one change add up to lr / (1 - momentum) times it. The published 0.7 and 0.9 make that 7 times, which diverges with a few dozen local steps of SGD with
momentum; the default, 0.7 and 0.3, makes it once.

All regions compute the same common parameters from the same contributions, bit for bit, so these are never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ephemeron.regions.policies.base import Arrays, Contribution, RegionPolicy, weighted_mean


class DiLoCo(RegionPolicy):
    """Outer SGD with Nesterov momentum.

    Args:
        lr: outer learning rate.
        momentum: outer momentum.
        mixing: part of a region's own parameters that it keeps where a round is applied late; None: see `mixing_for`.
    """

    synchronous: ClassVar[bool] = True

    def __init__(self, *, lr: float = 0.7, momentum: float = 0.3, mixing: float | None = None) -> None:
        self._lr, self._factor, self._mixing = lr, momentum, mixing
        self._common = self._momentum = np.zeros(0)

    def begin(self, parameters: np.ndarray) -> None:
        self._common, self._momentum = parameters.copy(), np.zeros_like(parameters)

    def contribution(self, part: slice, own: np.ndarray) -> np.ndarray:
        change: np.ndarray = self._common[part] - own[part]
        return change

    def merge(self, part: slice, own: np.ndarray, contributions: Sequence[Contribution], *, last: bool, late: float = 0.0) -> np.ndarray:
        if contributions:
            change = weighted_mean(contributions)
            momentum = self._factor * self._momentum[part].astype(np.float64) + change
            self._momentum[part] = momentum
            self._common[part] = self._common[part].astype(np.float64) - self._lr * (change + self._factor * momentum)
        mixing = mixing_for(late) if self._mixing is None else self._mixing
        if last or not mixing:
            return self._common[part].copy()
        mixed = mixing * own[part].astype(np.float64) + (1 - mixing) * self._common[part].astype(np.float64)
        return mixed.astype(own.dtype)

    def state(self) -> Arrays:
        momentum = {"momentum": self._momentum.copy()} if self._factor else {}
        return {"common": self._common.copy(), **momentum}

    def load(self, arrays: Arrays) -> None:
        self._common = arrays["common"].copy()
        self._momentum = arrays["momentum"].copy() if self._factor else np.zeros_like(self._common)


def mixing_for(late: float) -> float:
    """Part of its own parameters that a region keeps, so that half of the steps between two rounds count.

    Args:
        late: delay over H, at least 0 and below 1.
    """
    return max(0.0, 1 - 1 / (2 * late)) if late > 0 else 0.0
