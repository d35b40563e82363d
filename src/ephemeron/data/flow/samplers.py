"""The order of a loader's samples for training frameworks: `loader.sampler` and `loader.batch_sampler`.

Lightning and Hugging Face's `Trainer` set the epoch through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ephemeron.data.flow.epoch_index import EpochIndex


class EpochSource(Protocol):
    """The subset of a `FlowLoader` that its samplers use."""

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""

    @property
    def drop_last(self) -> bool:
        """True if an incomplete last step is left out."""

    @property
    def share(self) -> int:
        """Samples of an epoch for this rank."""

    def __len__(self) -> int:
        """Batches of an epoch."""

    def begin_epoch(self) -> Iterator[list[EpochIndex]]:
        """The next epoch as lists of samples."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration."""


class FlowSampler:
    """This rank's samples of an epoch. Each iteration begins the loader's next epoch, from its first sample."""

    def __init__(self, loader: EpochSource) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.share

    def __iter__(self) -> Iterator[EpochIndex]:
        for batch in self._loader.begin_epoch():
            yield from batch

    def set_epoch(self, epoch: int) -> None:
        """See `FlowLoader.set_epoch`."""
        self._loader.set_epoch(epoch)


class FlowBatchSampler:
    """This rank's batches of an epoch, as lists of samples. Each iteration begins the loader's next epoch, from its first batch."""

    def __init__(self, loader: EpochSource, sampler: FlowSampler) -> None:
        self._loader = loader
        self.sampler = sampler
        """The same samples, one by one."""

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self._loader.batch_size

    @property
    def drop_last(self) -> bool:
        """True if an incomplete last step is left out."""
        return self._loader.drop_last

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[EpochIndex]]:
        return (batch for batch in self._loader.begin_epoch() if batch)

    def set_epoch(self, epoch: int) -> None:
        """See `FlowLoader.set_epoch`."""
        self._loader.set_epoch(epoch)
