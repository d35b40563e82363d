"""One sample through the steps: with random numbers of its own, timed by step, and with errors that name the place.

A sample must not depend on the process that computes it, on the order, or on the samples before it. So before it is read, and
before each step, all generators that user code may draw from are seeded (`ephemeron.data.randomness`) from the job's seed, the
epoch, the sample's index and the step's number. Steps whose result may be cached are seeded from the flow and the index alone, since
they have to give the same in every epoch and for every job.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import xxhash

from ephemeron.data.flow.description import FlowDescription, FlowSource, MapStep
from ephemeron.data.randomness import (
    Watch,
    generator_argument,
    generator_parameter,
    generators_in,
    kept,
    reseed_from_system,
    sample_seed,
    seed_everything,
    stage_seed,
)
from ephemeron.errors import EphemeronError, JobError, SampleFailed
from ephemeron.user_code import guarded, line_of, raised_by

READ, NETWORK, COLLATE = "read", "network", "collate"
"""Names of the stages beside the steps: from the store, from loader to trainer, from samples to a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A sample to load."""

    index: int
    """Index of the sample in the dataset."""
    epoch: int = 0
    seed: int | None = None
    """Seed of the job; None: generators are not seeded."""

    def stage_seed(self, stage: int) -> int:
        """Seed of a stage: 0 is reading, step n is stage n + 1."""
        assert self.seed is not None
        return stage_seed(sample_seed(self.seed, self.epoch, self.index), stage)


@dataclass(slots=True)
class StageTimings:
    """Time of loading by stage, and the number of samples."""

    by_stage: dict[str, float] = field(default_factory=dict)
    samples: int = 0

    def add(self, stage: str, seconds: float) -> None:
        self.by_stage[stage] = self.by_stage.get(stage, 0.0) + seconds

    def merge(self, other: StageTimings) -> None:
        """Adds the timings of another process."""
        for stage, seconds in other.by_stage.items():
            self.add(stage, seconds)
        self.samples += other.samples


def open_source(source: FlowSource) -> Any:
    """A dataset with `__len__`, `__getitem__` and, if it can fetch many at once, `__getitems__`.

    Raises:
        DatasetNotFound, DatasetError: it does not exist, or cannot be read.
    """
    if source.dataset is not None:
        return source.dataset
    from ephemeron.data.catalog import DatasetReader

    return DatasetReader.open(source.name, source.variant, version=source.version, store=source.store, decode=source.decode)


def pinned(source: FlowSource) -> FlowSource:
    """The source with its version resolved and its store's URL absolute, so that other processes open the same.

    Raises:
        DatasetNotFound, DatasetError: it does not exist, or cannot be read.
    """
    if source.dataset is not None:
        return source
    from ephemeron.data.catalog import DatasetStore

    store = DatasetStore.open(source.store)
    return replace(source, version=store.dataset(source.name, source.version).version, store=store.files.url)


class SampleLoader:
    """A flow bound to its dataset.

    Args:
        flow: a flow with a source.
        dataset: result of `open_source`.
    """

    def __init__(self, flow: FlowDescription, dataset: Any) -> None:
        if flow.source is None:
            raise JobError(f"flow {flow.name} has no dataset", remedy="call .dataset(name, version, variant)")
        self.flow, self.dataset = flow, dataset
        self.seconds = StageTimings()
        self._salt = f"{flow.name}@{flow.version}"
        self._same = xxhash.xxh3_64_intdigest(self._salt.encode())
        self._asking: dict[int, str | None] = {}
        self._one_by_one = False

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def reads_are_pure(self) -> bool:
        """Whether reading draws no random numbers for any sample: then any thread may read, and many at once."""
        from ephemeron.data.catalog import DatasetReader

        return isinstance(self.dataset, DatasetReader) and not self.dataset.has_own_decoders

    @cached_property
    def held(self) -> tuple[Any, ...]:
        """Generators that the dataset and the steps hold."""
        kept_by = [] if self.reads_are_pure else [self.dataset]
        return generators_in(*kept_by, *((s.function, s.transform) for s in self.flow.steps))

    def load(self, items: Sequence[SampleRequest]) -> list[Any | SampleFailed]:
        """The samples of these items, in this order; the error in place of a sample that fails."""
        with self._kept(items):
            return self.map(items, self.fetch(items))

    def map(self, items: Sequence[SampleRequest], raws: Sequence[Any | SampleFailed]) -> list[Any | SampleFailed]:
        """The samples of `fetch` after the steps."""
        out: list[Any | SampleFailed] = []
        with self._kept(items):
            for item, raw in zip(items, raws, strict=True):
                out.append(raw if isinstance(raw, SampleFailed) else self.steps(item, raw))
                self.seconds.samples += 1
        return out

    def fetch(self, items: Sequence[SampleRequest]) -> list[Any | SampleFailed]:
        """The samples as the dataset returns them, each as if it were read alone.

        Seeds the generators of this process unless `reads_are_pure`; then any thread may call it.
        """
        pure = self.reads_are_pure
        with nullcontext() if pure else self._kept(items):
            together = self._together(items, seeded=not pure and any(item.seed is not None for item in items))
            return [self._alone(item, seeded=not pure) for item in items] if together is None else together

    def _together(self, items: Sequence[SampleRequest], *, seeded: bool) -> list[Any] | None:
        """The samples in one request; None where the dataset cannot, or a sample fails or draws."""
        many = getattr(self.dataset, "__getitems__", None)
        if many is None or len(items) < 2 or self._one_by_one:
            return None
        watch = Watch(self.held) if seeded else None
        if watch is not None:
            self.seed(items[0], 0)
            watch.begin()
        began = time.perf_counter()
        try:
            with guarded():
                found = list(many([item.index for item in items]))
        except Exception:  # noqa: BLE001 - the sample that failed is found when each is read alone
            return None
        finally:
            self.seconds.add(READ, time.perf_counter() - began)
        if len(found) != len(items) or (watch is not None and watch.drew()):
            self._one_by_one = True  # the draws of a sample must not depend on samples that are read before it
            return None
        return found

    def _alone(self, item: SampleRequest, *, seeded: bool) -> Any | SampleFailed:
        if seeded:
            self.seed(item, 0)
        began = time.perf_counter()
        try:
            with guarded():
                return self.dataset[item.index]
        except Exception as e:  # noqa: BLE001 - any error of a dataset belongs to a sample
            return self._failed(item, READ, e)
        finally:
            self.seconds.add(READ, time.perf_counter() - began)

    def steps(self, item: SampleRequest, sample: Any, *, first: int = 0, end: int | None = None) -> Any | SampleFailed:
        """A sample that has passed the steps before number `first`, after those before number `end`."""
        with self._kept([item]):
            for number, step in list(enumerate(self.flow.steps))[first:end]:
                seed = self.seed(item, number + 1)
                began = time.perf_counter()
                try:
                    with guarded():
                        sample = self._handed(number, step, seed).apply(sample)
                except Exception as e:  # noqa: BLE001 - the user's code
                    return self._failed(item, step.name, e)
                finally:
                    self.seconds.add(step.name, time.perf_counter() - began)
        return sample

    def _kept(self, items: Sequence[SampleRequest]) -> Any:
        """Context that restores the caller's generators, if they are seeded for these items."""
        return nullcontext() if all(item.seed is None for item in items) else kept(self.held)

    def seed(self, item: SampleRequest, stage: int) -> int | None:
        """Seeds the generators for a stage of an item (0: reading, n + 1: step n), and returns the seed.

        None: the item has no seed. Then generators continue, or, in loader processes, get a new seed from the system.
        """
        if item.seed is None:
            reseed_from_system(self.held)
            return None
        if 0 < stage <= self.flow.cached_steps:
            item = replace(item, seed=self._same, epoch=0)
        seed = item.stage_seed(stage)
        seed_everything(seed, self.held)
        return seed

    def asks(self, number: int) -> str | None:
        """Name of the parameter by which a step takes a generator; None: it takes none."""
        if number not in self._asking:
            self._asking[number] = generator_parameter(self.flow.steps[number].function)
        return self._asking[number]

    def _handed(self, number: int, step: MapStep, seed: int | None) -> MapStep:
        """The step, with a generator bound if its function takes one."""
        name = self.asks(number)
        if name is None:
            return step
        own = random.getrandbits(64) if seed is None else seed
        return replace(step, function=partial(step.function, **generator_argument(name, own)))

    def _failed(self, item: SampleRequest, stage: str, e: Exception) -> SampleFailed:
        file = getattr(raised_by(e), "file", "") or self._file_of(item.index)
        return SampleFailed(line_of(e)[:500], flow=self._salt, dataset=str(self.flow.source), index=item.index, step=stage, file=str(file))

    def _file_of(self, index: int) -> str:
        try:
            (meta,) = self.dataset.metas([index])
            return ", ".join(ref.path for ref in meta.data.values())
        except (AttributeError, EphemeronError, IndexError, ValueError):
            return ""
