"""Training of sparse models by asynchronous SGD on functions, through the sparse store (Cirrus, survey 2.1 and 2.2).

from ephemeron.sparse.models import LogisticRegression
from ephemeron.sparse.store import AdaGrad
from ephemeron.sparse.training import fit

result = fit(LogisticRegression(features=1 << 20), "data/train", AdaGrad(learning_rate=0.1), test="data/test", workers=4)
print(result.metrics, result.weights["weights"].shape)

minibatches   which rows of which partition form which step of which function: arithmetic
ring          minibatches that are loaded ahead, by a thread
part          what one function does: get rows, compute, send the gradient
served        shards that are started for a run, or the store that it is given
shares        the functions of a run and those that go on for them
run           the run: `fit`, progress, result
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ephemeron.sparse.training.part import PartReport
    from ephemeron.sparse.training.run import SparseResult, fit

_MODULES = {"PartReport": "part", "SparseResult": "run", "fit": "run"}

__all__ = ["PartReport", "SparseResult", "fit"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
