"""Sparse models: which rows of which tables a minibatch needs, and the gradient of these rows alone.

    base            the port `SparseModel`; batches, tables, steps
    linear          `LogisticRegression`, `Softmax`
    factorisation   `FactorisationMachine`, `MatrixFactorisation`
    topics          `LatentDirichletAllocation`
    local           tables in this process, with the optimisers of the store

Pure: arrays in, arrays out. What fetches rows and sends gradients is above (survey 2.1, figure 3: get model, compute, send gradient).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ephemeron.sparse.models.base import Batch, LocalTables, SparseModel, Step, Table
    from ephemeron.sparse.models.linear import FactorisationMachine, LogisticRegression, MatrixFactorisation, Softmax
    from ephemeron.sparse.models.topics import LatentDirichletAllocation

_MODULES = {
    "Batch": "base",
    "SparseModel": "base",
    "Step": "base",
    "Table": "base",
    "FactorisationMachine": "linear",
    "MatrixFactorisation": "linear",
    "LogisticRegression": "linear",
    "Softmax": "linear",
    "LocalTables": "base",
    "LatentDirichletAllocation": "topics",
}

__all__ = [
    "Batch",
    "FactorisationMachine",
    "LatentDirichletAllocation",
    "LocalTables",
    "LogisticRegression",
    "MatrixFactorisation",
    "Softmax",
    "SparseModel",
    "Step",
    "Table",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
