"""Training and test data of a job, for `prepare`: samples that are sent to the functions, or a flow that functions read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.data import DataSets, Samples, encode, load
from ephemeron.data.batch_source import BatchSource, Positions, TrainingBatch
from ephemeron.data.flow_spec import DataProvider, FlowSpec
from ephemeron.data.samples import fields_of
from ephemeron.data.shuffle import Indices
from ephemeron.data.sources.adapters import Pairs, is_pair
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
    provider = given if isinstance(given, DataProvider) else None
    if isinstance(given, DataProvider) or (given is None and job.data.flow is not None):
        from ephemeron.data.flow.from_job import find_flow
        from ephemeron.training.driver.launching.flow_data import FlowData

        named = find_flow(job.data, seed=job.seed, code=job.code, provider=provider)
        return FlowData(named, only_first=only_first, part=part)
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
    from ephemeron.data.flow.from_job import EVALUATION_DATA, TRAIN_DATA, provided

    assert job.task is not None
    provider = DataProvider(target=job.task.target, options=job.task.options)
    task = provided(provider, job.code)
    train = call(f"{job.task.target}.{TRAIN_DATA}", getattr(task, TRAIN_DATA), {}, job.code)
    if train is None:
        return None
    if job.data.flow is not None or job.data.path is not None:
        raise JobError(f"both task {job.task.target} and the job's [data] name training samples", remedy="leave one of them out")
    where = f"{TRAIN_DATA} of {job.task.target}"
    samples = _as_samples(train, where)
    if samples is None:
        return provider
    test = call(f"{job.task.target}.{EVALUATION_DATA}", getattr(task, EVALUATION_DATA), {}, job.code)
    if test is None:
        return hold_out(samples, job.data.test_fraction, seed=job.seed)
    tested = _as_samples(test, f"{EVALUATION_DATA} of {job.task.target}")
    if tested is None:
        raise JobError(
            f"{EVALUATION_DATA} of {job.task.target} returned {type(test).__name__}, but {TRAIN_DATA} a pair of arrays",
            remedy="return both in one form",
        )
    return DataSets(samples, tested)


def _as_samples(value: Any, where: str) -> Samples | None:
    """A pair of arrays, or of a table and a column, as samples; None: it is something else."""
    return Samples(*Pairs(*value, where=where).arrays()) if is_pair(value) else None


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
        return OneBatch(
            TrainingBatch((first.inputs, first.targets), len(first)),
            TrainingBatch((tested.inputs, tested.targets), len(tested)) if len(tested) else None,
        )

    def described(self) -> str:
        inputs, targets = self._data.train.inputs, self._data.train.targets
        if fields := fields_of(inputs.dtype):
            columns = ", ".join(f"{name} {[2, *dtype.shape]} ({dtype.base})" for name, dtype in fields.items())
            return f"a batch of columns {columns} with targets {targets.dtype}"
        return f"a batch of shape {[2, *inputs.shape[1:]]} ({inputs.dtype}) with targets {targets.dtype}"


class OneBatch:
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
