"""Samples of a flow by their place in a view: the part of `FlowView` that loaders need."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

from ephemeron.data.flow.backend import AnyLoading, Loaders, LocalLoaders
from ephemeron.data.flow.fingerprint import Fingerprint
from ephemeron.data.flow.sample_loader import SampleRequest
from ephemeron.data.flow.stream import EpochIndex, LoadedSamples
from ephemeron.data.randomness import generator_argument, generator_parameter, generators_in, kept, seed_everything
from ephemeron.data.shuffle import Indices
from ephemeron.errors import SampleFailed


class SampleView:
    """All samples of a flow, or a part of them, by their place in the view.

    Args:
        loading: the flow bound to its dataset.
        loaders: load ahead for iterations; None: no loading ahead.
        chosen: indices of the samples in the dataset; None: all of them.
        here: functions of `local_map`, in order.
    """

    def __init__(
        self, loading: AnyLoading, loaders: Loaders | None = None, *, chosen: Indices | None = None, here: Sequence[LocalMap] = ()
    ) -> None:
        self.loading = loading
        self.loaders = loaders or LocalLoaders(0)
        self._chosen = chosen
        self._here = tuple(here)
        self.fingerprint = Fingerprint.of(loading.flow, chosen)
        """Identity of the samples of this view, as they are before any is read."""

    def __len__(self) -> int:
        return len(self.loading) if self._chosen is None else len(self._chosen)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loading.flow!r}, {len(self)} samples)"

    def indices(self, positions: Indices) -> Indices:
        """Indices in the dataset of samples of this view."""
        return positions if self._chosen is None else self._chosen[positions]

    def index(self, position: SupportsIndex) -> int:
        """Index in the dataset of a sample of this view."""
        at = operator.index(position)
        if not 0 <= at < len(self):
            raise IndexError(f"flow {self.loading.flow.name}: sample {at} of {len(self)}")
        return at if self._chosen is None else int(self._chosen[at])

    @property
    def maps_here(self) -> bool:
        """True if there are functions of `local_map`."""
        return bool(self._here)

    def mapped_here(self, sample: Any, item: SampleRequest) -> Any:
        """A loaded sample after the functions of `local_map`."""
        first = len(self.loading.flow.steps) + 1  # earlier stages are reading and the steps
        for number, function in enumerate(self._here):
            sample = function(sample, item, first + number)
        return sample

    def to_mapped(self, *, seed: int | None = None, epoch: int = 0) -> FlowDataset:
        """Samples by index, for example as the dataset of `torch.utils.data.DataLoader`.

        Args:
            seed: None: random steps draw from the generators as they are. A number: a sample is the same in every process
                that requests it in an epoch.
            epoch: see `FlowDataset.set_epoch`.
        """
        return FlowDataset(self, seed=seed, epoch=epoch)


class FlowDataset:
    """A map-style dataset."""

    def __init__(self, read: SampleView, *, seed: int | None = None, epoch: int = 0) -> None:
        self._read, self._seed, self.epoch = read, seed, epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the random numbers, if there is a seed. Call it before the DataLoader's workers start."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._read)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Raises `SampleFailed` for the first one that cannot be loaded."""
        items = [
            SampleRequest(index=self._read.index(i), epoch=i.epoch if isinstance(i, EpochIndex) else self.epoch, seed=self._seed)
            for i in indices
        ]
        out = []
        for item, sample in zip(items, self._read.loading.load(items), strict=True):
            if isinstance(sample, SampleFailed):
                raise sample
            out.append(self._read.mapped_here(sample, item))
        return LoadedSamples(out, items)


# -- functions that map samples in the reading process ------------------------------------------------------------


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
