"""The table `[sparse]` of a job: a sparse model that is trained through a sparse store (`docs/sparse.md`).

[sparse]
model = "logistic"                      # or { target = "factorisation-machine", options = { factors = 8 } }
optimizer = { target = "ftrl", options = { alpha = 0.1, l1 = 1e-4 } }
shards = 2

Only values are here. What they mean is in `ephemeron.sparse.job`, which is above this layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ephemeron.config.typed import AtLeast, Count, NonNegative, Typed

SparseModelName = Literal["logistic", "softmax", "factorisation-machine", "matrix-factorisation", "lda"]
SparseOptimizerName = Literal["sgd", "adagrad", "ftrl", "adam"]

BATCH_SIZE = 1000
"""Samples of a step of one function, where the job says none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseModelSpec(Typed):
    """A sparse model."""

    target: SparseModelName
    """Its name."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Its options, such as `l2`, `classes` or `factors`. The number of features is the dataset's unless it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizerSpec(Typed):
    """An optimiser of the sparse store."""

    target: SparseOptimizerName
    """Its name."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Its options, such as `learning_rate`, or `alpha` and `l1` of FTRL."""


def _adagrad() -> SparseOptimizerSpec:
    return SparseOptimizerSpec(target="adagrad", options={"learning_rate": 0.1})


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseSpec(Typed):
    """A sparse model, and how it is trained."""

    model: SparseModelSpec
    """The model: a name, or a table with `target` and `options`."""
    optimizer: SparseOptimizerSpec = field(default_factory=_adagrad)
    """Optimiser of the shards. Counts of topic models are added up whatever it is."""
    shards: Count = 1
    """Processes of the client's machine that hold the parameters, each a range of rows."""
    store: tuple[str, ...] = ()
    """Addresses `HOST:PORT` of the shards of a store that functions reach, instead of `shards`; its token is in
    `EPHEMERON_SPARSE_TOKEN`."""
    ring: Annotated[int, AtLeast(0)] = 16
    """Minibatches that a function loads ahead; 0: none."""
    threshold: NonNegative = 0.0
    """Functions hold the gradient of a row back until an entry of it is at least this."""
    values: Literal["float32", "float16", "int8"] = "float32"
    """Type of the gradients that are sent; what rounding leaves is sent later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseProgram:
    """A sparse job as its functions read it."""

    spec: SparseSpec
    """With all options of its model."""
    dataset: str
    """URL of the training data."""
    test: str | None = None
    """URL of the test data; None: there are none."""
    rows: tuple[int, ...] = ()
    """Of each partition of the training data."""
    metrics: tuple[str, ...] = ()
    """Names of what evaluations report."""
