"""Functions that map samples in the reading process, and its rank in PyTorch's process group."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

from ephemeron.data.flow.sample_loader import SampleRequest
from ephemeron.data.randomness import generator_argument, generator_parameter, generators_in, kept, seed_everything


class LocalMap:
    """A function of `local_map`. Its random numbers are those of a step: they follow from seed, epoch and sample.

    Args:
        function: from sample to sample; a parameter `rng` or `generator` gets a generator of its own.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._held = generators_in(function)
        self._asks = generator_parameter(function)

    def __call__(self, sample: Any, item: SampleRequest, stage: int) -> Any:
        """The sample after the function; the process's own generators stay as they were.

        Args:
            sample: the sample after all steps and the functions before this one.
            item: request of the sample.
            stage: number of this function among all stages of a sample.
        """
        if item.seed is None:
            return self._call(sample, None)
        seed = item.stage_seed(stage)
        with kept(self._held):
            seed_everything(seed, self._held)
            return self._call(sample, seed)

    def _call(self, sample: Any, seed: int | None) -> Any:
        if self._asks is None:
            return self._function(sample)
        return self._function(sample, **generator_argument(self._asks, random.getrandbits(64) if seed is None else seed))


def process_group() -> tuple[int, int] | None:
    """Rank and world size of PyTorch's process group; None: there is none, or PyTorch is not imported."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())
