"""The port of policies: how a region's parameters take in what other regions have sent. Pure: arrays in, arrays out.

A policy has a state of its own (`state`, `load`), which a replacement restores. It never sees time, payloads or regions that are
late: `exchange` decides which contributions it is given, `schedule` when.

Asynchronous SGD among regions (Cloudless-Training, 2.3, figure 5): `asgd` after every iteration, `asgd-ga` with gradients accumulated over f.

The regions exchange the change that their own optimisers have made since the last exchange. With SGD that is the learning rate times the
accumulated gradient, so adding it is the receiver's SGD step with that gradient, as published; with other optimisers their steps are
exchanged. The optimiser's state stays in its region.

DiLoCo (Douillard et al., 2023) and its streaming form (Douillard et al., 2025): an outer optimiser for the mean change of all regions.

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


# -- asynchronous SGD among regions (Cloudless-Training -----------------------------------------------------------


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


# -- model averaging among regions (Cloudless-Training ------------------------------------------------------------


class _Average(RegionPolicy):
    """A region sends its parameters, and keeps nothing else between rounds."""

    averages: ClassVar[bool] = True

    def begin(self, parameters: np.ndarray) -> None:
        return

    def contribution(self, part: slice, own: np.ndarray) -> np.ndarray:
        return own[part].copy()


class SynchronousAverage(_Average):
    """SMA(f): all regions go on with the mean of their parameters, weighted by samples."""

    synchronous: ClassVar[bool] = True

    def merge(self, part: slice, own: np.ndarray, contributions: Sequence[Contribution], *, last: bool, late: float = 0.0) -> np.ndarray:
        return weighted_mean(contributions).astype(own.dtype) if contributions else own[part]


class AsynchronousAverage(_Average):
    """AMA(f): a region goes on with the mean of its own parameters and those that have arrived, each with the same weight."""

    synchronous: ClassVar[bool] = False

    def merge(self, part: slice, own: np.ndarray, contributions: Sequence[Contribution], *, last: bool, late: float = 0.0) -> np.ndarray:
        if not contributions:
            return own[part]
        return weighted_mean([Contribution(own[part], 1), *(Contribution(c.vector, 1) for c in contributions)]).astype(own.dtype)


# -- diLoCo (Douillard et al. -------------------------------------------------------------------------------------


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
