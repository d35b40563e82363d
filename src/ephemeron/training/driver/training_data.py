"""Training and test data of a job, for `prepare`: samples that are sent to the functions, or a flow that functions read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.data import DataSets, Samples, encode, load
from ephemeron.data.batch_source import BatchSource, Positions, TrainingBatch
from ephemeron.data.flow.batch_source import encode_indices
from ephemeron.data.flow.collate import Collator
from ephemeron.data.flow.from_job import EVALUATION_DATA, TRAIN_DATA, NamedFlow, find_flow, provided
from ephemeron.data.flow.prefetch import collated
from ephemeron.data.flow.sample_loader import SampleRequest
from ephemeron.data.flow_spec import DataProvider, FlowSpec
from ephemeron.data.shuffle import Indices
from ephemeron.data.sources.registry import hold_out
from ephemeron.data.user_function import call
from ephemeron.errors import JobError
from ephemeron.training.job import Job, check_data

TRIAL = 2
"""Samples of the batch on which the model is tried, at most."""


class TrainingData(Protocol):
    """The training and the test set of a job."""

    flow: FlowSpec | None
    samples: int
    """Number of training samples, at least 1."""
    test_samples: int

    def share(self, positions: Indices) -> list[Buffer]:
        """Object with a function's share of the training set."""

    def test_share(self, positions: Indices) -> list[Buffer]:
        """Object with a function's share of the test set."""

    def held_bytes(self, owned: int, batch: int) -> int:
        """Least bytes of samples in a function that owns so many and has this batch size."""

    def trial(self, most: int = TRIAL) -> BatchSource:
        """Source of one small training batch of at most `most` samples, and of one test batch if there is a test set."""

    def described(self) -> str:
        """Description of the trial batch, for messages."""


def training_data(job: Job, *, only_first: int | None = None, part: Sequence[int] | None = None) -> TrainingData:
    """Loads the samples, or finds the flow.

    Args:
        job: whose data.
        only_first: train on so many samples and test on none.
        part: positions of the training samples to train on; None: all.

    Raises:
        JobError, MissingExtra, DatasetNotFound, DatasetError: the data cannot be read.
    """
    check_data(job.data)
    given = None if job.task is None else _of_task(job)
    if isinstance(given, DataProvider):
        return FlowData(
            find_flow(job.data, seed=job.seed, code=job.code, provider=given), only_first=only_first, part=part
        )
    if given is None and job.data.flow is not None:
        return FlowData(find_flow(job.data, seed=job.seed, code=job.code), only_first=only_first, part=part)
    data = given or load(job.data, seed=job.seed, code=job.code)
    if len(data.train) == 0:
        raise JobError(f"data source {job.data.source!r} has no training samples")
    if only_first is not None:
        first = np.arange(min(only_first, len(data.train)))
        data = DataSets(train=data.train.take(first), test=data.test.take(np.arange(0)))
    if part is not None:
        data = DataSets(train=data.train.take(np.asarray(part)), test=data.test)
    return ArrayData(data)


def _of_task(job: Job) -> DataSets | DataProvider | None:
    """Data of a job's task: arrays; a provider of datasets that functions read; None: the task has none.

    Raises:
        JobError: `train_data` or `evaluation_data` raises or returns something else, or the job names data, too.
    """
    assert job.task is not None
    provider = DataProvider(target=job.task.target, options=job.task.options)
    task = provided(provider, job.code)
    train = call(f"{job.task.target}.{TRAIN_DATA}", getattr(task, TRAIN_DATA), {}, job.code)
    if train is None:
        return None
    if job.data.flow is not None or job.data.path is not None:
        raise JobError(
            f"both task {job.task.target} and the job's [data] name training samples", remedy="leave one of them out"
        )
    samples = _as_samples(train)
    if samples is None:
        return provider
    test = call(f"{job.task.target}.{EVALUATION_DATA}", getattr(task, EVALUATION_DATA), {}, job.code)
    if test is None:
        return hold_out(samples, job.data.test_fraction, seed=job.seed)
    tested = _as_samples(test)
    if tested is None:
        raise JobError(
            f"{EVALUATION_DATA} of {job.task.target} returned {type(test).__name__}, but {TRAIN_DATA} a pair of arrays",
            remedy="return both in one form",
        )
    return DataSets(samples, tested)


def _as_samples(value: Any) -> Samples | None:
    """A pair of arrays or tensors as samples; None: it is something else."""
    if not (isinstance(value, (tuple, list)) and len(value) == 2 and all(hasattr(v, "__array__") for v in value)):
        return None
    inputs, targets = (np.asarray(v) for v in value)
    return Samples(inputs, targets)


class ArrayData:
    """Samples that are sent to the functions."""

    flow: FlowSpec | None = None

    def __init__(self, data: DataSets) -> None:
        self._data = data
        self.samples, self.test_samples = len(data.train), len(data.test)

    def share(self, positions: Indices) -> list[Buffer]:
        return encode(self._data.train.take(positions))

    def test_share(self, positions: Indices) -> list[Buffer]:
        return encode(self._data.test.take(positions))

    def held_bytes(self, owned: int, batch: int) -> int:
        return owned * self._data.train.nbytes // self.samples

    def trial(self, most: int = TRIAL) -> BatchSource:
        first = self._data.train.take(np.arange(min(most, self.samples)))
        tested = self._data.test.take(np.arange(min(most, self.test_samples)))
        return _OneBatch(
            TrainingBatch((first.inputs, first.targets), len(first)),
            TrainingBatch((tested.inputs, tested.targets), len(tested)) if len(tested) else None,
        )

    def described(self) -> str:
        inputs, targets = self._data.train.inputs, self._data.train.targets
        return f"a batch of shape {[2, *inputs.shape[1:]]} ({inputs.dtype}) with targets {targets.dtype}"


class FlowData:
    """Samples that functions read from a flow."""

    def __init__(self, named: NamedFlow, *, only_first: int | None = None, part: Sequence[int] | None = None) -> None:
        if part is not None:
            named = dataclasses.replace(named, train_indices=named.train_indices[np.asarray(part)])
        if only_first is not None:
            named = dataclasses.replace(
                named, train_indices=named.train_indices[:only_first], test_indices=named.test_indices[:0]
            )
        self._named = named
        self.flow: FlowSpec | None = named.spec
        self.samples, self.test_samples = len(named.train_indices), len(named.test_indices)
        self._trial = self._first(TRIAL)

    def share(self, positions: Indices) -> list[Buffer]:
        return encode_indices(self._named.train_indices[positions])

    def test_share(self, positions: Indices) -> list[Buffer]:
        return encode_indices(self._named.test_indices[positions])

    def held_bytes(self, owned: int, batch: int) -> int:
        return min(owned, batch) * self._named.spec.sample_nbytes

    def trial(self, most: int = TRIAL) -> BatchSource:
        batch = TrainingBatch(self._first(most), len(self._named.tried[:most]))
        return _OneBatch(batch, batch if self.test_samples else None)

    def _first(self, most: int) -> Any:
        named = self._named
        tried = named.tried[:most]
        items = [SampleRequest(index=int(i), seed=0) for i in named.train_indices[: len(tried)]]
        return collated(tried, Collator(named.collate), named.train, items, pairs=named.spec.pairs)

    def described(self) -> str:
        part = self._named.spec.train.target
        if not self._named.spec.pairs:
            return f"a batch of {part}: {_described(self._trial)}"
        inputs, targets = map(_described, self._trial)
        return f"a batch of flow {part} with inputs {inputs} and targets {targets}"


class _OneBatch:
    """A batch source with one training batch and at most one test batch."""

    def __init__(self, batch: TrainingBatch, test: TrainingBatch | None) -> None:
        self._batch, self._test = batch, test

    @property
    def test_samples(self) -> int:
        return 0 if self._test is None else self._test.samples

    def batch(self, positions: Positions, iteration: int) -> TrainingBatch:
        return self._batch

    def tests(self) -> Iterator[TrainingBatch]:
        return iter(() if self._test is None else (self._test,))

    def close(self) -> None:
        pass


def _described(value: Any) -> str:
    """Dtype and shape, such as `float32[2, 3, 8, 8]`, of an array or a tree of arrays."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_described(v)}' for k, v in value.items())}}}"
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
