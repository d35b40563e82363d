"""Indices that contain their epoch, and samples that contain their request, for frameworks that load batches.

Accelerate's `skip_first_batches`, with which Hugging Face's `Trainer` resumes, builds a `torch.utils.data.DataLoader`
from `loader.dataset` and `loader.batch_sampler`. Each index contains the epoch, so that its sample has the random
numbers of that epoch in any process that loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ephemeron.data.flow.collate import Collator
from ephemeron.data.flow.sample_loader import SampleRequest


class EpochIndex(int):
    """A sample's place in a view, and the epoch in which it is requested."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type[EpochIndex], tuple[int, int]]:
        return EpochIndex, (int(self), self.epoch)


class LoadedSamples(list[Any]):
    """Samples of a view with their requests."""

    def __init__(self, samples: Iterable[Any], items: Sequence[SampleRequest]) -> None:
        super().__init__(samples)
        self.items = items


class SeededCollate:
    """A loader's collate function for other loaders of its batches: equal samples give equal batches."""

    def __init__(self, collator: Collator) -> None:
        self._collator = collator

    def __call__(self, samples: list[Any]) -> Any:
        return self._collator(samples, samples.items if isinstance(samples, LoadedSamples) else ())
