"""Indices that carry their epoch, and samples that carry what was requested, for frameworks that load batches themselves.

Accelerate's `skip_first_batches`, by which Hugging Face's `Trainer` resumes, builds a `torch.utils.data.DataLoader` of
`loader.dataset` and `loader.batch_sampler`. Each index carries the epoch, so that its sample has the random numbers of
that epoch in whichever process it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ephemeron.data.flow.collate import Collator
from ephemeron.data.flow.sample_loader import SampleRequest


class EpochIndex(int):
    """A sample's place in a view, and the epoch in which it is asked for."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type[EpochIndex], tuple[int, int]]:
        return EpochIndex, (int(self), self.epoch)


class LoadedSamples(list[Any]):
    """Samples of a view, and what was asked for."""

    def __init__(self, samples: Iterable[Any], items: Sequence[SampleRequest]) -> None:
        super().__init__(samples)
        self.items = items


class SeededCollate:
    """A loader's collate function for whoever loads its batches by other means: equal samples give equal batches."""

    def __init__(self, collator: Collator) -> None:
        self._collator = collator

    def __call__(self, samples: list[Any]) -> Any:
        return self._collator(samples, samples.items if isinstance(samples, LoadedSamples) else ())
