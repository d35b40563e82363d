"""A flow that can be read: by index, or as shuffled batches; whole, or a part of it (DPFlow, tables 3-2 and 3-3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from ephemeron.data.flow.flow import DataLoadFlow
from ephemeron.data.flow.loaders import AnyLoading, Loaders, LocalLoaders, Sampling
from ephemeron.data.flow.loading import Item, Loading, open_source
from ephemeron.data.flow.shuffled import ShuffledFlow
from ephemeron.data.flow.stream import Stream
from ephemeron.data.scheduling import Remainder
from ephemeron.data.shuffle import Indices, Purpose, permutation
from ephemeron.errors import JobError, SampleFailed


class DataLoadFlowReader(ABC):
    """Makes a described flow readable."""

    @abstractmethod
    def read(self, flow: DataLoadFlow) -> DataLoadFlowRead:
        """The flow, bound to its dataset. The flow may be changed afterwards without effect on what was read.

        Raises:
            JobError: it has no dataset.
            DatasetNotFound, DatasetError: the dataset is not there, or cannot be read.
        """


class LocalDataLoadFlowReader(DataLoadFlowReader):
    """Reads in this process, or in loader processes that it starts.

    Args:
        workers: loader processes of an iteration over `to_shuffled`; 0: everything happens when it is asked for.
        lease_s: after which a loader that does not answer is taken for lost; None: twenty times what is usual.

    Raises:
        JobError: a negative number of workers.
    """

    def __init__(self, workers: int = 0, *, lease_s: float | None = None) -> None:
        if workers < 0:
            raise JobError(f"workers = {workers} should be at least 0")
        self.workers, self.lease_s = workers, lease_s

    def read(self, flow: DataLoadFlow) -> DataLoadFlowRead:
        if flow.source is None:
            raise JobError(f"flow {flow.name} has no dataset", remedy="call .dataset(name, version, variant)")
        loaders = LocalLoaders(self.workers, lease_s=self.lease_s)
        return DataLoadFlowRead(Loading(flow.clone(), open_source(flow.source)), loaders)


class DataLoadFlowRead:
    """A view of a flow: all of its samples, or a part of them."""

    def __init__(
        self, loading: AnyLoading, loaders: Loaders | None = None, *, chosen: Indices | None = None,
        here: Sequence[Callable[[Any], Any]] = (),
    ) -> None:  # fmt: skip
        self.loading = loading
        self.loaders = loaders or LocalLoaders(0)
        self._chosen = chosen
        self._here = tuple(here)

    def __len__(self) -> int:
        return len(self.loading) if self._chosen is None else len(self._chosen)

    def __repr__(self) -> str:
        return f"DataLoadFlowRead({self.loading.flow!r}, {len(self)} samples)"

    def indices(self, positions: Indices) -> Indices:
        """The dataset's numbers of samples of this view."""
        return positions if self._chosen is None else self._chosen[positions]

    def index(self, position: SupportsIndex) -> int:
        """The dataset's number of a sample of this view."""
        at = int(position)
        if not 0 <= at < len(self):
            raise IndexError(f"flow {self.loading.flow.name}: sample {at} of {len(self)}")
        return at if self._chosen is None else int(self._chosen[at])

    @property
    def maps_here(self) -> bool:
        """Whether there are functions of `local_map`."""
        return bool(self._here)

    def local_map(self, function: Callable[[Any], Any]) -> DataLoadFlowRead:
        """The same view, with a function that maps whole samples in the process that reads, not in loaders."""
        return self._with(here=(*self._here, function))

    def subset(self, indices: Iterable[SupportsIndex]) -> DataLoadFlowRead:
        """A part of this view, in the order of the indices, which may repeat.

        Raises:
            IndexError: an index is negative or too large.
        """
        return self._with(chosen=np.array([self.index(i) for i in indices], dtype=np.intp))

    def _with(self, **changed: Any) -> DataLoadFlowRead:
        kept = {"chosen": self._chosen, "here": self._here}
        return DataLoadFlowRead(self.loading, self.loaders, **{**kept, **changed})

    def mapped_here(self, sample: Any) -> Any:
        """A loaded sample after the functions of `local_map`."""
        for function in self._here:
            sample = function(sample)
        return sample

    def to_mapped(self, *, seed: int | None = None, epoch: int = 0) -> MappedFlow:
        """Samples by index, for example as the dataset of `torch.utils.data.DataLoader`.

        Args:
            seed: None: random steps draw as they would anywhere. A number: they draw the same for a sample whoever
                asks for it, in an epoch.
            epoch: see `MappedFlow.set_epoch`.
        """
        return MappedFlow(self, seed=seed, epoch=epoch)

    def to_shuffled(
        self, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None = None, prefetch: int = 4, *, seed: int = 0,
        shuffle: bool = True, rank: int = 0, world_size: int = 1, remainder: Remainder = "keep", on_error: str = "fail",
        prefetch_mb: float = 512.0, progress: bool = False, sampling: Sampling = "own",
    ) -> ShuffledFlow:  # fmt: skip
        """Batches, each sample once per epoch over all ranks.

        Args:
            batch_size: samples per batch and rank.
            collate_fn: from a list of samples to a batch; None: PyTorch's default, or stacked arrays without PyTorch.
            prefetch: batches loaded ahead (only with loader processes).
            seed: with the epoch it fixes the order and every random step, whatever the number of loaders.
            shuffle: False: in the view's order.
            rank: this process among those that share the samples.
            world_size: how many share them; all of them get the same number of batches.
            remainder: of an epoch that is no multiple of a step: `keep` it as smaller last steps, `drop` it, or `pad` it
                with the epoch's first samples. Where fewer samples are left than ranks (after resuming, or with batches of
                one), `keep` gives some ranks None as their last batch.
            on_error: `fail`, `skip` (counted), or `retry:N` and then fail.
            prefetch_mb: limit of what is loaded ahead; the next batch is loaded in any case.
            progress: a bar on standard error.
            sampling: `own`: the order is fixed by the seed, and the same wherever the flow is read. `shared`: a service
                draws for all jobs that read the flow together, so that they use the same samples at about the same
                time; each order is as random as before, and depends on what the others do.

        Raises:
            JobError: an argument makes no sense.
        """
        stream = Stream(
            samples=len(self), batch_size=batch_size, seed=seed, rank=rank, world_size=world_size, shuffle=shuffle,
            remainder=remainder,
        )  # fmt: skip
        if sampling != "own":
            stream = self.loaders.shared(stream, sampling, self._chosen)
        return ShuffledFlow(
            self, stream, collate_fn=collate_fn, prefetch=prefetch, prefetch_mb=prefetch_mb, on_error=on_error,
            progress=progress,
        )  # fmt: skip


class MappedFlow:
    """A map-style dataset."""

    def __init__(self, read: DataLoadFlowRead, *, seed: int | None = None, epoch: int = 0) -> None:
        self._read, self._seed, self.epoch = read, seed, epoch

    def set_epoch(self, epoch: int) -> None:
        """Of the random numbers, where there is a seed. Before the DataLoader's workers start."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._read)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Raises `SampleFailed` for the first one that cannot be loaded."""
        items = [Item(index=self._read.index(i), epoch=self.epoch, seed=self._seed) for i in indices]
        out = []
        for sample in self._read.loading.load(items):
            if isinstance(sample, SampleFailed):
                raise sample
            out.append(self._read.mapped_here(sample))
        return out


def random_split(
    flows: Sequence[DataLoadFlowRead], lengths: Sequence[float], *, seed: int = 0
) -> list[DataLoadFlowRead] | list[list[DataLoadFlowRead]]:
    """Disjoint random parts of flows over the same samples (DPFlow, algorithm 3.2).

    Args:
        flows: views of equally many samples, usually with different steps, e.g. for training and for validation.
        lengths: shares that add up to 1, or numbers of samples that add up to all.
        seed: of the draw.

    Returns:
        With as many flows as lengths, part i of flow i, which is what one usually wants; otherwise for each length its
        part of every flow.

    Raises:
        JobError: flows of different lengths, or lengths that do not add up.
    """
    if not flows:
        raise JobError("random_split needs at least one flow")
    total = len(flows[0])
    if any(len(flow) != total for flow in flows):
        raise JobError(f"random_split: the flows have {[len(f) for f in flows]} samples", remedy="use equally many")
    counts = _counts(lengths, total)
    order = permutation(total, seed=seed, purpose=Purpose.HOLDOUT)
    parts = np.split(order, np.cumsum(counts)[:-1])
    if len(flows) == len(parts):
        return [flow.subset(np.sort(part)) for flow, part in zip(flows, parts, strict=True)]
    return [[flow.subset(np.sort(part)) for flow in flows] for part in parts]


def _counts(lengths: Sequence[float], total: int) -> list[int]:
    if not lengths or min(lengths) < 0:
        raise JobError(f"lengths = {list(lengths)} should be shares or numbers of samples, not negative")
    if all(float(x).is_integer() for x in lengths) and sum(lengths) == total and total != 1:
        return [int(x) for x in lengths]
    if abs(sum(lengths) - 1) > 1e-9:
        raise JobError(f"lengths = {list(lengths)} add up to {sum(lengths):g}", remedy=f"make it 1, or {total} samples")
    edges = np.floor(np.cumsum([0.0, *lengths]) * total + 0.5).astype(int)
    return [int(n) for n in np.diff(edges)]
