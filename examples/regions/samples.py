"""Digits of a region: of low digits Shanghai has most, of high ones Chongqing. Only functions of a region call `region` with its name.

Each image belongs to one region. In a real run this module would open a table or a folder of images that only its region can reach.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ephemeron.data import DataSpec, load
from ephemeron.data.flow import Flow

SHARE_OF_LOW = {"shanghai": 0.9, "chongqing": 0.1}
"""Part of the images of digits 0 to 5 that a region has; of digits 6 to 9 it has the rest."""


class Digits:
    """Images of one region, float32 (1, 8, 8), with their labels."""

    def __init__(self, region: str) -> None:
        found = load(DataSpec(source="digits", test_fraction=0.0), seed=0).train
        here = np.random.default_rng(0).random(len(found)) < SHARE_OF_LOW["shanghai"]
        in_shanghai = np.where(found.targets < 6, here, ~here)
        self._samples = found.take(np.flatnonzero(in_shanghai == (region == "shanghai")))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._samples.inputs[index], self._samples.targets[index]


def region(region: str) -> Flow:
    """The samples of a region.

    Args:
        region: its name, from `data.options` in `regions.toml`.
    """
    return Flow(f"digits/{region}", version=1).dataset(Digits(region))
