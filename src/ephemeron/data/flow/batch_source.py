"""A function's share of a job's flow: the batches that the job's sampler assigns to it, read and mapped where it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ephemeron.data.batch_source import EVALUATION_BATCH, Positions, TrainingBatch
from ephemeron.data.catalog.loop import end as end_reading
from ephemeron.data.flow.collate import Collate
from ephemeron.data.flow.from_job import collate_of, open_part
from ephemeron.data.flow.prefetch import Inline, LoadStrategy, Prefetcher, load_strategy
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest
from ephemeron.data.flow_spec import SERVICE_VARIABLE, FlowSpec
from ephemeron.data.iteration_samples import Timeline
from ephemeron.data.samples import Buffer
from ephemeron.data.shuffle import Indices
from ephemeron.errors import CorruptMessage
from ephemeron.units import MB

_LITTLE = np.dtype("<i8")
EVALUATION_BYTES = 64 * MB
"""Largest batch for evaluation, unless a single sample is larger."""


def encode_indices(indices: Indices) -> list[Buffer]:
    """Sample indices as bytes."""
    return [np.ascontiguousarray(indices, dtype=_LITTLE).tobytes()]


def decode_indices(data: memoryview | bytes) -> Indices:
    """The inverse of `encode_indices`.

    Raises:
        CorruptMessage: the bytes are no sequence of indices.
    """
    if len(data) % _LITTLE.itemsize:
        raise CorruptMessage(f"{len(data)} bytes are no sequence of sample indices")
    return np.frombuffer(data, dtype=_LITTLE).astype(np.intp)


class FlowBatchSource:
    """A `BatchSource` that reads a flow.

    Batches are loaded ahead in processes or a thread (`prefetch`), or by the data service that the variable
    `EPHEMERON_DATA_SERVICE` names; the slice of the test set is read here, once per epoch.

    Args:
        spec: of the job's flow.
        train_indices, test_indices: samples of the datasets that this function uses.
        seed: of the job: with epoch and index it determines the random numbers of steps, in whichever function they run.
        iterations: of the run; none after them is loaded ahead.
        timeline: epochs and iterations.
        code: folders of the user's code.
        own_process: True if this process may fork and start threads.

    Raises:
        JobError, DatasetError: the flow has changed since the run was started.
    """

    def __init__(
        self,
        spec: FlowSpec,
        *,
        train_indices: Indices,
        test_indices: Indices,
        seed: int,
        iterations: int,
        timeline: Timeline,
        code: Sequence[Path],
        own_process: bool,
    ) -> None:
        train = open_part(spec.train, spec, code)
        collate = collate_of(spec.collate, code, spec.provider)
        self._train_indices, self._test_indices = train_indices, test_indices
        self._seed, self._iterations, self._timeline = seed, iterations, timeline
        self._prefetcher = Prefetcher(
            loading=train,
            strategy=_strategy(train, spec, collate, own_process=own_process),
            collate=collate,
            on_error=spec.on_error,
            prefetch_bytes=spec.prefetch_mb * MB,
            pairs=spec.pairs,
        )
        self._test: SampleLoader | None = None
        self._spec, self._code, self._own_process = spec, code, own_process
        self._known: dict[int, list[SampleRequest]] = {}
        self._positions: Positions | None = None

    @property
    def test_samples(self) -> int:
        return len(self._test_indices)

    def batch(self, positions: Positions, iteration: int) -> TrainingBatch:
        if positions is not self._positions:
            self._positions, self._known = positions, {}
        self._known = {i: items for i, items in self._known.items() if i >= iteration}
        return self._prefetcher.get(iteration, lambda i: self._wanted(positions, i, asked=iteration))

    def _wanted(self, positions: Positions, iteration: int, *, asked: int) -> list[SampleRequest] | None:
        if iteration != asked and iteration >= self._iterations:
            return None
        if iteration not in self._known:
            epoch = self._timeline.epoch_of(iteration)
            chosen = self._train_indices[positions.batch(iteration)]
            self._known[iteration] = [SampleRequest(index=int(i), epoch=epoch, seed=self._seed) for i in chosen]
        return self._known[iteration]

    def tests(self) -> Iterator[TrainingBatch]:
        if len(self._test_indices) == 0:
            return
        if self._test is None:
            self._test = open_part(self._spec.test, self._spec, self._code)
        reading = Prefetcher(
            loading=self._test,
            strategy=Inline(self._test),
            collate=self._prefetcher.collate,
            on_error=self._spec.on_error,
            pairs=self._spec.pairs,
        )
        size = max(1, min(EVALUATION_BATCH, int(EVALUATION_BYTES // max(1, self._spec.sample_nbytes))))
        items = [SampleRequest(index=int(i), epoch=0, seed=self._seed) for i in self._test_indices]
        for start in range(0, len(items), size):
            part = items[start : start + size]
            yield reading.get(start, partial(_same, part))

    def close(self) -> None:
        self._prefetcher.close()
        if self._own_process:
            end_reading()


def _strategy(loading: SampleLoader, spec: FlowSpec, collate: Collate, *, own_process: bool) -> LoadStrategy:
    """Through the data service of this function's environment, or in this process and its children."""
    address = os.environ.get(SERVICE_VARIABLE)
    if address and own_process:
        from ephemeron.data.service.reader import Served

        return Served(loading, collate, address=address)
    return load_strategy(loading, loaders=spec.loaders, own_process=own_process, collate=collate)


def _same(items: list[SampleRequest], iteration: int) -> list[SampleRequest]:
    """The requests of a single batch, for any iteration."""
    return items
