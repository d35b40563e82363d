"""Models and optimisers of sparse jobs, by the names that a job gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ephemeron.config.typed import build
from ephemeron.data.tables import TableDataset
from ephemeron.errors import JobError
from ephemeron.sparse.models import (
    FactorisationMachine,
    LatentDirichletAllocation,
    LogisticRegression,
    MatrixFactorisation,
    Softmax,
    SparseModel,
)
from ephemeron.sparse.store.codec import Compression
from ephemeron.sparse.store.optimizers import Optimizer, optimizer
from ephemeron.training.job.sparse_spec import SparseModelName, SparseSpec

MODELS: Mapping[SparseModelName, type[SparseModel]] = {
    "logistic": LogisticRegression,
    "softmax": Softmax,
    "factorisation-machine": FactorisationMachine,
    "matrix-factorisation": MatrixFactorisation,
    "lda": LatentDirichletAllocation,
}
_LABELLED = ("logistic", "softmax", "factorisation-machine", "matrix-factorisation")


def model_of(spec: SparseSpec) -> SparseModel:
    """The model of a job.

    Raises:
        JobError: an option is unknown, missing, or of a wrong type.
    """
    return build(MODELS[spec.model.target], spec.model.options, where=f"sparse.model {spec.model.target}")


def optimizer_of(spec: SparseSpec) -> Optimizer:
    """The optimiser of a job.

    Raises:
        JobError: an option is unknown, missing, or out of bounds.
    """
    return optimizer({"kind": spec.optimizer.target, **spec.optimizer.options}, where="sparse.optimizer")


def compression_of(spec: SparseSpec) -> Compression:
    """Compression of the gradients that functions send."""
    return Compression(threshold=spec.threshold, values=spec.values)


def fitted_to(spec: SparseSpec, dataset: TableDataset) -> SparseSpec:
    """The job's table with the number of features of a dataset, unless it gives one.

    Raises:
        JobError: the dataset has no sparse column, or more than one; it has more features than the model, or no label.
    """
    sparse = [column for column in dataset.schema if column.kind == "sparse"]
    if len(sparse) != 1:
        names = ", ".join(column.name for column in sparse) or "none"
        raise JobError(f"{dataset.url} has not one sparse column: {names}", remedy='hash its columns: [[steps]] step = "hash"')
    if spec.model.target in _LABELLED and not any(column.kind == "label" for column in dataset.schema):
        raise JobError(
            f"{dataset.url} has no label, which sparse.model {spec.model.target} needs", remedy="name the label column in the recipe"
        )
    options, width = dict(spec.model.options), sparse[0].width
    if "features" in {f.name for f in dataclasses.fields(MODELS[spec.model.target])}:  # type: ignore[arg-type]
        features = options.setdefault("features", width)
        if isinstance(features, int) and features < width:
            raise JobError(
                f"{dataset.url} has {width} features, and sparse.model.options.features = {features}",
                remedy=f"give {width}, or leave it out",
            )
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, options=options))
