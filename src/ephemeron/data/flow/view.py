"""A flow that can be read: by index, or as shuffled batches; whole, or a part of it (DPFlow, tables 3-2 and 3-3)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np

from ephemeron.data.flow.backend import LocalLoaders, Sampling
from ephemeron.data.flow.description import FlowDescription
from ephemeron.data.flow.loader import FlowLoader
from ephemeron.data.flow.sample_loader import SampleLoader, open_source, pinned
from ephemeron.data.flow.sample_view import LocalMap, SampleView, process_group
from ephemeron.data.flow.stream import BatchStream
from ephemeron.data.scheduler import Remainder
from ephemeron.data.shuffle import Purpose, permutation
from ephemeron.errors import JobError


class FlowReader(ABC):
    """Makes views of flows."""

    @abstractmethod
    def read(self, flow: FlowDescription) -> FlowView:
        """A view of a flow, bound to the present version of its dataset.

        Raises:
            JobError: the flow has no dataset.
            DatasetNotFound, DatasetError: the dataset does not exist, or cannot be read.
        """


class LocalReader(FlowReader):
    """Reads in this process, or in loader processes that it starts.

    Args:
        workers: loader processes of an iteration over `to_shuffled`; 0: samples are loaded on request.
        lease_s: time after which a loader that does not answer counts as lost; None: twenty times the usual time.

    Raises:
        JobError: the number of workers is negative.
    """

    def __init__(self, workers: int = 0, *, lease_s: float | None = None) -> None:
        if workers < 0:
            raise JobError(f"workers = {workers} should be at least 0")
        self.workers, self.lease_s = workers, lease_s

    def read(self, flow: FlowDescription) -> FlowView:
        if flow.source is None:
            raise JobError(f"flow {flow.name} has no dataset", remedy="call .dataset(name, version, variant)")
        loaders = LocalLoaders(self.workers, lease_s=self.lease_s)
        source = pinned(flow.source)
        return FlowView(SampleLoader(replace(flow, source=source), open_source(source)), loaders)


class FlowView(SampleView):
    """A view of a flow that can be read: by index, or as shuffled batches; whole, or a part of it."""

    def local_map(self, function: Callable[[Any], Any]) -> FlowView:
        """The view with a function that maps whole samples in the reading process, not in loaders.

        Its random numbers are determined by seed, epoch and sample, as those of a step; the process's own generators are
        restored.
        """
        return self._with(here=(*self._here, LocalMap(function)))

    def subset(self, indices: Iterable[SupportsIndex]) -> FlowView:
        """A part of this view.

        Args:
            indices: places in this view, in the order of the part; they may repeat. Or a mask: for each sample of this
                view, in order, True if it is in the part.

        Raises:
            IndexError: an index is negative or too large.
            JobError: the mask has another length, or there are truth values among indices.
        """
        given = list(indices)
        truths = sum(map(_is_truth, given))
        if truths == 0:
            return self._with(chosen=np.array([self.index(i) for i in given], dtype=np.intp))
        if truths < len(given):
            raise JobError(
                f"subset of {self.loading.flow.name}: {truths} of {len(given)} indices are True or False",
                remedy="give places, or a mask with one truth value for each sample",
            )
        if len(given) != len(self):
            raise JobError(
                f"subset of {self.loading.flow.name}: a mask of {len(given)} for a view of {len(self)} samples",
                remedy="give one truth value for each sample, or places",
            )
        return self._with(chosen=self.indices(np.flatnonzero([bool(truth) for truth in given])))

    def _with(self, **changed: Any) -> FlowView:
        kept = {"chosen": self._chosen, "here": self._here}
        return FlowView(self.loading, self.loaders, **{**kept, **changed})

    def to_shuffled(
        self,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 4,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        remainder: Remainder = "even",
        on_error: str = "fail",
        prefetch_mb: float = 512.0,
        progress: bool = False,
        sampling: Sampling = "own",
    ) -> FlowLoader:
        """Batches, each sample once per epoch over all ranks.

        Args:
            batch_size: samples per batch and rank.
            collate_fn: from a list of samples to a batch; None: PyTorch's default, or stacked arrays without PyTorch.
            prefetch: batches loaded ahead (only with loader processes).
            seed: with the epoch it determines the order and every random step, for any number of loaders.
            shuffle: False: in the view's order.
            rank: this process among those that share the samples; None: as in PyTorch's process group, 0 without one.
            world_size: how many share them; all of them get the same number of batches. None: as in PyTorch's process
                group, 1 without one. With neither number, a group that begins only afterwards is an error when batches are
                read, since all its ranks would read the same ones: give both, or make the loader later.
            remainder: treatment of an epoch's rest, which is smaller than a batch for every rank. `even`: a smaller last
                batch, equally large for all ranks; where the rest cannot be shared out evenly, it is filled up with fewer
                than `world_size` samples from the epoch's beginning (for one rank: none). `drop`: left out. `pad`: filled
                up to a whole batch for every rank. `keep`: nothing comes twice; sizes differ by one, and a rank for which
                there is nothing gets None, which the loop has to expect.
            on_error: `fail`, `skip` (counted), or `retry:N` and then fail.
            prefetch_mb: limit of the memory loaded ahead, in MB; the next batch is loaded in any case.
            progress: a bar on standard error.
            sampling: `own`: the order is fixed by the seed, and the same for every reader of the flow. `shared`: a
                service draws for all jobs that read the flow together, so that they use the same samples at about the
                same time; each order is equally random, and depends on the other jobs.

        Raises:
            JobError: an argument is out of range.
        """
        group = process_group() if rank is None and world_size is None else (rank or 0, world_size or 1)
        at, of = group or (0, 1)
        stream = BatchStream(
            samples=len(self), batch_size=batch_size, seed=seed, rank=at, world_size=of, shuffle=shuffle, remainder=remainder
        )
        if sampling != "own":
            stream = self.loaders.shared(stream, sampling, self._chosen)
        return FlowLoader(
            self,
            stream,
            collate_fn=collate_fn,
            prefetch=prefetch,
            prefetch_mb=prefetch_mb,
            on_error=on_error,
            progress=progress,
            alone=group is None,
        )


def random_split(flows: FlowView | Sequence[FlowView], lengths: Sequence[float], *, seed: int = 0) -> list[FlowView]:
    """Disjoint random parts (DPFlow, algorithm 3.2).

    Args:
        flows: one view, or one for each length, over the same samples but usually with different steps, e.g. for training
            and for validation.
        lengths: shares that add up to 1, or numbers of samples that add up to all.
        seed: seed of the draw: equal seeds and lengths give equal parts.

    Returns:
        The part for each length: of the single view, or part i of view i.

    Raises:
        JobError: the number of views is neither one nor that of the lengths, views differ in length, or the lengths do
            not add up.
    """
    views = [flows] if isinstance(flows, FlowView) else list(flows)
    if len(views) not in (1, len(lengths)) or not views:
        raise JobError(f"random_split: {len(views)} flows for {len(lengths)} lengths", remedy="give one flow, or one for each length")
    total = len(views[0])
    if any(len(view) != total for view in views):
        raise JobError(f"random_split: the flows have {[len(v) for v in views]} samples", remedy="use equally many")
    counts = _counts(lengths, total)
    order = permutation(total, seed=seed, purpose=Purpose.HOLDOUT)
    parts = np.split(order, np.cumsum(counts)[:-1])
    of = views * len(parts) if len(views) == 1 else views
    return [view.subset(np.sort(part)) for view, part in zip(of, parts, strict=True)]


def _is_truth(value: Any) -> bool:
    """Whether a value is True or False, of Python, NumPy or PyTorch."""
    return isinstance(value, bool | np.bool_) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def _counts(lengths: Sequence[float], total: int) -> list[int]:
    if not lengths or min(lengths) < 0:
        raise JobError(f"lengths = {list(lengths)} should be shares or numbers of samples, not negative")
    if all(float(x).is_integer() for x in lengths) and sum(lengths) == total and total != 1:
        return [int(x) for x in lengths]
    if abs(sum(lengths) - 1) > 1e-9:
        raise JobError(f"lengths = {list(lengths)} add up to {sum(lengths):g}", remedy=f"make it 1, or {total} samples")
    edges = np.floor(np.cumsum([0.0, *lengths]) * total + 0.5).astype(int)
    return [int(n) for n in np.diff(edges)]


# -- flows as users declare them ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Flow(FlowDescription):
    """A data flow. It is immutable: `dataset`, `map` and the other methods return another flow, so calls can be chained.

    `prepare_read` passes it to a reader: in this process, in loader processes, or in a service shared by many jobs.
    """

    def prepare_read(self, reader: FlowReader | None = None) -> FlowView:
        """A view of the flow that can be iterated.

        Args:
            reader: decides where samples are loaded; None: in this process.

        Raises:
            JobError: the flow has no dataset.
            DatasetNotFound, DatasetError: the dataset does not exist, or cannot be read.
        """
        return (reader or LocalReader()).read(self)
