"""A group of one rank: nothing is sent or copied.

K-REDUCE with one rank gives the same result and keeps three copies of the vector meanwhile, which is too much where a function
holds as much of a model as its memory allows.
"""

from __future__ import annotations

import numpy as np

from ephemeron.training.collectives.group import Collective, Group, Reduced


class SingleRank(Collective):
    """See `Collective`. The submitted vector is divided in place.

    Args:
        group: of one rank.
    """

    def __init__(self, group: Group) -> None:
        assert group.world == 1
        self._submitted: dict[int, tuple[np.ndarray, float, int]] = {}

    def submit(self, iteration: int, vector: np.ndarray, weight: float, flags: int = 0) -> None:
        self._submitted[iteration] = (vector, weight, flags)

    async def upload(self, iteration: int) -> None:
        pass

    async def reduce(self, iteration: int) -> None:
        pass

    async def wait(self, version: int) -> Reduced:
        vector, weight, flags = self._submitted.pop(version)
        if weight > 0:
            vector /= vector.dtype.type(weight)
        return Reduced(vector, flags)
