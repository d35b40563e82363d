"""A trained sparse model: the tables of a run, for predictions and evaluations in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.tables import TableDataset
from ephemeron.errors import UserError
from ephemeron.runs import folders
from ephemeron.runs.folders import RunFolder
from ephemeron.sparse.job.programs import model_of
from ephemeron.sparse.models import Batch, SparseModel
from ephemeron.sparse.models.base import Floats
from ephemeron.sparse.training.run import evaluate, opened
from ephemeron.training.driver.records import run_spec
from ephemeron.training.driver.trained import record_of


class SparseRowsLike(Protocol):
    """Sparse rows: row i has the entries `indptr[i]` to `indptr[i + 1]`."""

    @property
    def indptr(self) -> NDArray[np.int64]: ...
    @property
    def indices(self) -> NDArray[np.int64]: ...
    @property
    def values(self) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSparseModel:
    """A model and its tables."""

    model: SparseModel
    weights: Mapping[str, Floats]
    """By table, float32[rows, width]."""

    def predict(self, rows: SparseRowsLike) -> NDArray[np.float64]:
        """Predictions for rows in compressed form: a `Batch`, or the sparse column that `Pipeline.transform` gives; see the model."""
        batch = Batch(rows.indptr, rows.indices, rows.values)
        needed = self.model.rows(batch)
        return self.model.predict(batch, needed, {name: self.weights[name][at] for name, at in needed.items()})

    def evaluate(self, dataset: TableDataset | str | Path) -> dict[str, float]:
        """Metrics over all rows of a prepared dataset.

        Raises:
            DatasetNotFound: there is no such dataset.
            JobError: the model does not take its features or labels.
        """
        return evaluate(self.model, self.weights, opened(dataset))


def trained_model(run: str | Path) -> TrainedSparseModel:
    """The model that a run has trained, or a stopped one has trained so far.

    Args:
        run: its name, the beginning of it, or `last`; or its folder.

    Raises:
        RunNotFound: there is no such run.
        UserError: it is not of a sparse job, or has no weights.
    """
    from safetensors.numpy import load_file

    folder = RunFolder(run) if isinstance(run, Path) else folders.find(run, kinds=folders.MODELS)
    spec = run_spec(record_of(folder))
    if spec.sparse is None:
        raise UserError(f"run {folder.run_id} is not of a sparse job; its model is that of result.model()")
    if not folder.weights.exists():
        raise UserError(f"run {folder.run_id} has no weights: it has neither finished nor was it stopped")
    return TrainedSparseModel(model=model_of(spec.sparse.spec), weights=load_file(str(folder.weights)))
