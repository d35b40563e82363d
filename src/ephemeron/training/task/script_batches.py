"""Batches of a script's loader, in the same order on every rank, and each rank's part of them.

The loader's batch is the global batch. Of a `DataLoader` over a map-style dataset only the index lists are drawn, on all ranks
alike; each rank loads the samples of its part. All other iterables are iterated whole, and cut along their first axis. Random
numbers depend on seed, epoch and sample alone (`data.randomness`), so neither the number of workers nor a restart changes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ephemeron.data import plan_split
from ephemeron.data.randomness import batch_seed, generators_in, kept, sample_seed, seed_everything
from ephemeron.errors import JobError
from ephemeron.training.task.tensors import sliced


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part of one rank."""

    rank: int = 0
    weights: tuple[int, ...] = (1,)
    """Proportions of the ranks."""

    def of(self, samples: int) -> tuple[int, int]:
        """Begin and end of this rank's part of a batch."""
        ends = np.cumsum(plan_split(samples, self.weights).counts)
        return int(ends[self.rank - 1]) if self.rank else 0, int(ends[self.rank])


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a batch."""

    data: Any
    samples: int
    """0: the rank has no sample in this batch; `data` is one of another rank, and does not count."""


class LoaderBatches:
    """Batches of one loader.

    Args:
        loader: a `DataLoader`, or any iterable that yields the batches of an epoch each time it is iterated.
        seed: of the order and of random numbers of samples.
        share: of this rank.
        per_worker: the loader's batch is that of each worker; rank r takes batches r, W + r, 2·W + r, ….
        processes: whether the loader's processes (`num_workers`) load the samples.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, share: Share, per_worker: bool, processes: bool) -> None:
        self.loader, self._seed, self._share, self._per_worker = loader, seed, share, per_worker
        self._lists: list[list[Any]] = []
        self._drawn = 0
        """Epochs whose lists were drawn."""
        self._by_index = (
            isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None
        )
        self._processes = processes and self._by_index and isinstance(loader, DataLoader) and loader.num_workers > 0

    def draw(self, epoch: int) -> None:
        """Draws the order of an epoch. Epochs before it are drawn, too, because samplers may keep a state of their own."""
        if not self._by_index:
            return
        assert isinstance(self.loader, DataLoader)
        while self._drawn <= epoch:
            with kept():
                seed_everything(batch_seed(self._seed, self._drawn, []))
                self._lists = [list(indices) for indices in self.loader.batch_sampler]  # type: ignore[union-attr]
            self._drawn += 1

    def sizes(self, epoch: int, workers: int) -> list[int]:
        """Samples of each global batch of an epoch that is drawn. Iterates a loader whose samples have no index."""
        if self._by_index:
            sizes = [len(indices) for indices in self._lists]
        else:
            sizes = [_length(batch) for batch in self._iterated(epoch)]
        if not self._per_worker:
            return sizes
        return [sum(sizes[i : i + workers]) for i in range(0, len(sizes), workers)]

    def parts(self, epoch: int, first: int) -> Iterator[Part]:
        """This rank's part of each batch of an epoch, from batch `first` on."""
        world = len(self._share.weights)
        if self._by_index:
            lists = self._lists[first * world :] if self._per_worker else self._lists[first:]
            yield from self._loaded([self._chosen(group) for group in self._grouped(lists)], epoch)
            return
        for number, group in enumerate(self._grouped(self._iterated(epoch))):
            if number >= first:
                yield self._cut(group)

    def _grouped(self, batches: Iterable[Any]) -> Iterator[list[Any]]:
        size = len(self._share.weights) if self._per_worker else 1
        group: list[Any] = []
        for batch in batches:
            group.append(batch)
            if len(group) == size:
                yield group
                group = []
        if group:
            yield group

    def _chosen(self, group: list[list[Any]]) -> tuple[list[Any], int]:
        """Indices that this rank loads of a global batch, and the number of those that count."""
        if self._per_worker:
            own = group[self._share.rank] if self._share.rank < len(group) else []
        else:
            begin, end = self._share.of(len(group[0]))
            own = group[0][begin:end]
        return (own, len(own)) if own else (group[0][:1], 0)

    def _cut(self, group: list[Any]) -> Part:
        if self._per_worker:
            own = self._share.rank < len(group)
            return Part(group[self._share.rank if own else 0], _length(group[self._share.rank]) if own else 0)
        length = _length(group[0])
        begin, end = self._share.of(length)
        if end - begin == length:
            return Part(group[0], length)
        return Part(sliced(group[0], length, *((begin, end) if end > begin else (0, 1))), end - begin)

    def _iterated(self, epoch: int) -> Iterator[Any]:
        held = generators_in(getattr(self.loader, "dataset", self.loader))
        with kept(held):
            seed_everything(batch_seed(self._seed, epoch, []), held)
            batches = iter(self.loader)
        number = 0
        while True:
            with kept(held):
                seed_everything(batch_seed(self._seed, epoch, [number]), held)
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch
            number += 1

    def _loaded(self, chosen: Sequence[tuple[list[Any], int]], epoch: int) -> Iterator[Part]:
        loader = self.loader
        assert isinstance(loader, DataLoader)
        held = generators_in(loader.dataset, loader.collate_fn)
        samples = _Samples(loader.dataset, self._seed, epoch, held)
        collate = _Collate(loader.collate_fn, self._seed, epoch, held)
        if not self._processes:
            for indices, counted in chosen:
                with kept(held):
                    batch = collate([samples[i] for i in indices])
                yield Part(batch, counted)
            return
        processes: Iterable[Any] = DataLoader(
            samples,
            batch_sampler=[indices for indices, _ in chosen],
            collate_fn=collate,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),
        )
        for batch, (_, counted) in zip(processes, chosen, strict=True):
            yield Part(batch, counted)


class _Samples(Dataset[tuple[Any, Any]]):
    """A dataset whose samples draw from generators that are seeded for each of them."""

    def __init__(self, dataset: Any, seed: int, epoch: int, held: Sequence[Any]) -> None:
        self._dataset, self._seed, self._epoch, self._held = dataset, seed, epoch, held

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        with kept(self._held):
            seed_everything(sample_seed(self._seed, self._epoch, _number(index)), self._held)
            return index, self._dataset[index]


class _Collate:
    """A collate function under the seed of its samples."""

    def __init__(self, collate: Any, seed: int, epoch: int, held: Sequence[Any]) -> None:
        self._collate, self._seed, self._epoch, self._held = collate, seed, epoch, held

    def __call__(self, samples: Sequence[tuple[Any, Any]]) -> Any:
        with kept(self._held):
            seed_everything(batch_seed(self._seed, self._epoch, [_number(i) for i, _ in samples]), self._held)
            return self._collate([sample for _, sample in samples])


def _number(index: Any) -> int:
    """An index as a number; keys of other types are hashed alike in every process."""
    return int(index) if isinstance(index, (int, np.integer)) else int(xxhash.xxh3_64_intdigest(repr(index).encode())) % 2**63


def _length(batch: Any) -> int:
    """Number of samples of a batch: the length of its first tensor, array or list."""
    found = _first_length(batch)
    if not found:
        raise JobError(
            f"a batch is a {type(batch).__name__} whose number of samples is not known",
            remedy="let the loader yield tensors whose first axis is the sample, alone or in tuples and dicts",
        )
    return found


def _first_length(value: Any) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return len(value) if value.ndim else 0
    inner = list(value.values()) if hasattr(value, "values") else value if isinstance(value, (tuple, list)) else []
    lengths = [n for v in inner if (n := _first_length(v))]
    if lengths:
        return lengths[0]
    return len(value) if isinstance(value, list) else 0
