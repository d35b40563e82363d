"""Training data that functions read themselves, from the flow of a job: of it, only the first samples are read here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.communication.channels.base import Buffer
from ephemeron.data.batch_source import BatchSource, TrainingBatch
from ephemeron.data.flow.batch_source import encode_indices
from ephemeron.data.flow.collate import Collator, collated
from ephemeron.data.flow.from_job import NamedFlow
from ephemeron.data.flow.sample_loader import SampleRequest
from ephemeron.data.flow_spec import FlowSpec
from ephemeron.data.shuffle import Indices
from ephemeron.training.driver.launching.training_data import TRIAL, OneBatch


class FlowData:
    """Samples that functions read from a flow."""

    def __init__(self, named: NamedFlow, *, only_first: int | None = None, part: Sequence[int] | None = None) -> None:
        if part is not None:
            named = dataclasses.replace(named, train_indices=named.train_indices[np.asarray(part)])
        if only_first is not None:
            named = dataclasses.replace(named, train_indices=named.train_indices[:only_first], test_indices=named.test_indices[:0])
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
        return OneBatch(batch, batch if self.test_samples else None)

    def _first(self, most: int) -> Any:
        named = self._named
        tried = named.tried[:most]
        items = [SampleRequest(index=int(i), seed=0) for i in named.train_indices[: len(tried)]]
        return collated(tried, Collator(named.collate), named.train.flow, items, pairs=named.spec.pairs)

    def described(self) -> str:
        part = self._named.spec.train.target
        if not self._named.spec.pairs:
            return f"a batch of {part}: {_described(self._trial)}"
        inputs, targets = map(_described, self._trial)
        return f"a batch of flow {part} with inputs {inputs} and targets {targets}"


def _described(value: Any) -> str:
    """Dtype and shape, such as `float32[2, 3, 8, 8]`, of an array or a tree of arrays."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_described(v)}' for k, v in value.items())}}}"
    if hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
