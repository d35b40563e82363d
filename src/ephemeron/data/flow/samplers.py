"""What training frameworks ask a loader for its order: `loader.sampler`, `loader.batch_sampler`, and indices that know their epoch.

Lightning and Hugging Face's `Trainer` set the epoch through them. Accelerate's `skip_first_batches`, by which that `Trainer`
resumes, builds a `torch.utils.data.DataLoader` of `loader.dataset` and `loader.batch_sampler`: so that its samples have the
random numbers of their epoch, whichever process loads them, each index carries the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ephemeron.data.flow.collate import Collator
from ephemeron.data.flow.sample_loader import SampleRequest

if TYPE_CHECKING:
    from ephemeron.data.flow.loader import FlowLoader


class EpochIndex(int):
    """A sample's place in a view, and the epoch in which it is asked for."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __reduce__(self) -> tuple[type[EpochIndex], tuple[int, int]]:
        return EpochIndex, (int(self), self.epoch)


class LoaderOrder(list[Any]):
    """Samples of a view, and what was asked for."""

    def __init__(self, samples: Iterable[Any], items: Sequence[SampleRequest]) -> None:
        super().__init__(samples)
        self.items = items


class SeededCollate:
    """A loader's collate function for whoever loads its batches by other means: equal samples give equal batches."""

    def __init__(self, collator: Collator) -> None:
        self._collator = collator

    def __call__(self, samples: list[Any]) -> Any:
        return self._collator(samples, samples.items if isinstance(samples, LoaderOrder) else ())


class FlowSampler:
    """This rank's samples of an epoch. Each iteration begins the loader's next epoch, from its first sample."""

    def __init__(self, loader: FlowLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.share

    def __iter__(self) -> Iterator[EpochIndex]:
        for batch in self._loader.batch_sampler:
            yield from batch

    def set_epoch(self, epoch: int) -> None:
        """See `FlowLoader.set_epoch`."""
        self._loader.set_epoch(epoch)


class FlowBatchSampler:
    """This rank's batches of an epoch, as lists of samples. Each iteration begins the loader's next epoch, from its first batch."""

    def __init__(self, loader: FlowLoader) -> None:
        self._loader = loader

    @property
    def batch_size(self) -> int:
        """Samples per batch and rank."""
        return self._loader.batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last step is left out."""
        return self._loader.drop_last

    @property
    def sampler(self) -> FlowSampler:
        """The same samples, one by one."""
        return self._loader.sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[EpochIndex]]:
        return (batch for batch in self._loader.begin_epoch() if batch)

    def set_epoch(self, epoch: int) -> None:
        """See `FlowLoader.set_epoch`."""
        self._loader.set_epoch(epoch)
