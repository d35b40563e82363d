"""One sample through the steps: with random numbers of its own, timed by step, and with errors that say where.

A sample must not depend on which process computes it, in which order, or after how many others. So before each step the
global generators (`random`, `numpy.random`, `torch`, as far as they are imported) are seeded from the job's seed, the
epoch, the sample's index and the step's number. Steps whose result may be cached are seeded from the flow and the index
alone, since they have to give the same in every epoch and for every job.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from ephemeron.data.flow.flow import DataLoadFlow, Source
from ephemeron.errors import EphemeronError, JobError, SampleFailed

READ, NETWORK, COLLATE = "read", "network", "collate"
"""Names of the stages before and after the steps: from the store, from loader to trainer, from samples to a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What is to be loaded."""

    index: int
    """Of the sample in the dataset."""
    epoch: int = 0
    seed: int | None = None
    """Of the job; None: random numbers are left alone."""


@dataclass(slots=True)
class Seconds:
    """Where the time of loading went, and how often."""

    by_stage: dict[str, float] = field(default_factory=dict)
    samples: int = 0

    def add(self, stage: str, seconds: float) -> None:
        self.by_stage[stage] = self.by_stage.get(stage, 0.0) + seconds

    def merge(self, other: Seconds) -> None:
        """Adds what another process counted."""
        for stage, seconds in other.by_stage.items():
            self.add(stage, seconds)
        self.samples += other.samples


def open_source(source: Source) -> Any:
    """A dataset with `__len__`, `__getitem__` and, where it can fetch many at once, `__getitems__`.

    Raises:
        DatasetNotFound, DatasetError: it is not there, or cannot be read.
    """
    if source.dataset is not None:
        return source.dataset
    from ephemeron.data.catalog import DatasetReader

    return DatasetReader.open(
        source.name, source.variant, version=source.version, store=source.store, decode=source.decode
    )


def pinned(source: Source) -> Source:
    """The same with the version and the store that it means here and now, so that other processes open no other.

    Raises:
        DatasetNotFound, DatasetError: it is not there, or cannot be read.
    """
    if source.dataset is not None:
        return source
    from ephemeron.data.catalog import DatasetStore

    store = DatasetStore.open(source.store)
    return replace(source, version=store.dataset(source.name, source.version).version, store=store.files.url)


class Loading:
    """A flow bound to its dataset.

    Args:
        flow: with a source.
        dataset: of `open_source`.
    """

    def __init__(self, flow: DataLoadFlow, dataset: Any) -> None:
        if flow.source is None:
            raise JobError(f"flow {flow.name} has no dataset", remedy="call .dataset(name, version, variant)")
        self.flow, self.dataset = flow, dataset
        self.seconds = Seconds()
        self._salt = f"{flow.name}@{flow.version}"

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, items: Sequence[Item]) -> list[Any | SampleFailed]:
        """The samples of these items, in this order; in place of one that raises, the error."""
        return self.map(items, self.fetch(items))

    def map(self, items: Sequence[Item], raws: Sequence[Any | SampleFailed]) -> list[Any | SampleFailed]:
        """What `fetch` read, after the steps."""
        out: list[Any | SampleFailed] = []
        for item, raw in zip(items, raws, strict=True):
            out.append(raw if isinstance(raw, SampleFailed) else self.steps(item, raw))
            self.seconds.samples += 1
        return out

    def fetch(self, items: Sequence[Item]) -> list[Any | SampleFailed]:
        """The samples as the dataset has them. Draws no random numbers of its own, so any thread may do it."""
        began = time.perf_counter()
        try:
            many = getattr(self.dataset, "__getitems__", None)
            if many is not None and len(items) > 1:
                return list(many([item.index for item in items]))
            return [self.dataset[item.index] for item in items]
        except Exception as e:  # noqa: BLE001 - whatever a dataset raises belongs to a sample
            if len(items) == 1:
                return [self._failed(items[0], READ, e)]
        finally:
            self.seconds.add(READ, time.perf_counter() - began)
        return [sample for item in items for sample in self.fetch([item])]  # to find out which one it was

    def steps(self, item: Item, sample: Any, *, first: int = 0, end: int | None = None) -> Any | SampleFailed:
        """A sample that has passed the steps before number `first`, after those before number `end`."""
        cached = self.flow.cached_steps
        with _unchanged_randomness(item.seed is not None):
            for number, step in list(enumerate(self.flow.steps))[first:end]:
                if item.seed is not None:
                    job = self._salt if number < cached else f"{item.seed}/{item.epoch}"
                    seed_everything(xxhash.xxh3_64_intdigest(f"{job}/{item.index}/{number}".encode()))
                began = time.perf_counter()
                try:
                    sample = step.apply(sample)
                except Exception as e:  # noqa: BLE001 - the user's code
                    return self._failed(item, step.name, e)
                finally:
                    self.seconds.add(step.name, time.perf_counter() - began)
        return sample

    def _failed(self, item: Item, stage: str, e: Exception) -> SampleFailed:
        file = getattr(e, "file", "") or self._file_of(item.index)
        return SampleFailed(
            f"{type(e).__name__}: {' '.join(str(e).split())[:500]}", flow=self._salt, dataset=str(self.flow.source),
            index=item.index, step=stage, file=str(file),
        )  # fmt: skip

    def _file_of(self, index: int) -> str:
        try:
            (meta,) = self.dataset.metas([index])
            return ", ".join(ref.path for ref in meta.data.values())
        except (AttributeError, EphemeronError, IndexError, ValueError):
            return ""


def seed_everything(seed: int) -> None:
    """Seeds the global generators of those libraries that are imported."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    # Not torch.manual_seed, which looks for devices; and another thread may just be importing it.
    generator: Any = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.manual_seed(seed % 2**63)


@contextmanager
def _unchanged_randomness(seeded: bool) -> Iterator[None]:
    """Leaves the caller's generators as they were."""
    if not seeded or not _OUTSIDE:
        yield
        return
    restore = [keep() for keep in _keepers()]
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


_OUTSIDE: list[bool] = [True]
"""Emptied in loader processes, where nobody else draws."""


def nobody_else_draws() -> None:
    """Called in loader processes: the state of generators need not be kept."""
    _OUTSIDE.clear()


def _keepers() -> Iterator[Callable[[], Callable[[], None]]]:
    def of_random() -> Callable[[], None]:
        state = random.getstate()
        return lambda: random.setstate(state)

    def of_numpy() -> Callable[[], None]:
        state = sys.modules["numpy"].random.get_state()
        return lambda: sys.modules["numpy"].random.set_state(state)

    def of_torch() -> Callable[[], None]:
        generator: Any = sys.modules["torch"].default_generator
        state = generator.get_state()
        return lambda: generator.set_state(state)

    yield of_random
    if "numpy" in sys.modules:
        yield of_numpy
    if hasattr(sys.modules.get("torch"), "default_generator"):
        yield of_torch
