"""Prepared datasets with numeric columns (`data/tables`): what `ephemeron prepare` writes, where it hashes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ephemeron.data.samples import Samples
from ephemeron.data.sources.options import NoOptions, need_path, read_options
from ephemeron.data.spec import DataSpec
from ephemeron.data.tables import TableDataset, dense_batch
from ephemeron.data.tables.batches import beyond_float32
from ephemeron.errors import DatasetError, DatasetNotFound, JobError


def read(spec: DataSpec) -> tuple[Samples, Samples | None]:
    """Numeric columns as float32 inputs, and labels: whole numbers for classes, else float32.

    The path is that of a dataset, or of a folder with the datasets `train` and `test`.

    Raises:
        JobError: it is no such dataset, a column is not numeric, a value is absent or beyond float32, or there is no label.
        MissingExtra: pyarrow is not installed.
    """
    read_options(spec, NoOptions)
    path = need_path(spec, "a prepared dataset")
    if (path / "train").is_dir():
        return _samples(path / "train"), _samples(path / "test") if (path / "test").is_dir() else None
    return _samples(path), None


def _samples(path: Path) -> Samples:
    try:
        dataset = TableDataset.open(str(path))
        other = [column.name for column in dataset.schema if column.kind in ("categorical", "sparse")]
        if other:
            raise JobError(f"{path}: column {other[0]} is not numeric", remedy="leave it out, or train a sparse model (docs/sparse.md)")
        parts = [dense_batch(table) for table in dataset.tables()]
    except (DatasetNotFound, DatasetError) as e:
        raise JobError(str(e)) from None
    labels = [part for _, part in parts if part is not None]
    if len(labels) < len(parts) or not parts:
        raise JobError(f"{path} has no label", remedy="name its column in the recipe: [label] column = …")
    inputs, targets = np.concatenate([part for part, _ in parts]), np.concatenate(labels)
    if np.isnan(inputs).any():
        raise JobError(f"{path} has absent values", remedy="leave out the columns or rows that have them")
    names = [column.name for column in dataset.schema if column.kind == "numeric"]
    label = next(column.name for column in dataset.schema if column.kind == "label")
    for values, columns in ((inputs, names), (targets[:, None], [label])):
        if len(beyond := np.argwhere(beyond_float32(values))):
            row, at = beyond[0]
            raise JobError(
                f"{path}: column {columns[at]}, row {row + 1}: {float(values[row, at])!r} is beyond float32",
                remedy="scale the column when the data is prepared",
            )
    inputs = inputs.astype(np.float32)
    whole = bool(np.all(targets == np.floor(targets))) and targets.dtype != np.float64
    return Samples(inputs, targets.astype(np.int64 if whole else np.float32))
