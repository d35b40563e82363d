"""Jobs with a table `[sparse]`: from a job file to a run with folder, events, bill and weights (`docs/sparse.md`).

programs      models and optimisers by the names that a job gives them
preparing     what is refused before the start; the specification of a run
function      the entry `sparse-part`: one function's share
driving       the client's side of a run: shards, functions, their replacements, evaluations, limits
evaluation    metrics at the ends of epochs, as events
trained       a trained model, for predictions and evaluations

`training` finds this package by name (`training.job.sparse_spec.sparse_jobs`), and calls `prepare`, `drive` and `trained_model`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ephemeron.sparse.job.driving import drive
    from ephemeron.sparse.job.preparing import prepare
    from ephemeron.sparse.job.trained import TrainedSparseModel, trained_model

_MODULES = {"TrainedSparseModel": "trained", "drive": "driving", "prepare": "preparing", "trained_model": "trained"}

__all__ = ["TrainedSparseModel", "drive", "prepare", "trained_model"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
