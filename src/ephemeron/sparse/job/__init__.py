"""Jobs with a table `[sparse]`: from a job file to a run with folder, events, bill and weights (`docs/sparse.md`).

programs      models and optimisers by the names that a job gives them
preparing     what is refused before the start; the specification of a run
function      the entry `sparse-part`: one function's share
driving       the client's side of a run: shards, functions, their replacements, evaluations, limits
evaluation    metrics at the ends of epochs, as events
trained       a trained model, for predictions and evaluations
prediction    time and cost of a run from the costs of its steps: pure
profile       what was measured of a job, and the costs that follow
profiling     measures a job on this machine
predictor     predictions of jobs and their trials, from the stored profile
plan          numbers of functions and shards within limits

`training` finds this package by name (`training.job.sparse_spec.sparse_jobs`), and calls `prepare`, `drive` and `trained_model`;
`tuning` calls `sparse_predictor` in the same way.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ephemeron.sparse.job.driving import drive
    from ephemeron.sparse.job.predictor import sparse_predictor
    from ephemeron.sparse.job.preparing import prepare
    from ephemeron.sparse.job.trained import TrainedSparseModel, trained_model

_MODULES = {
    "TrainedSparseModel": "trained",
    "drive": "driving",
    "prepare": "preparing",
    "sparse_predictor": "predictor",
    "trained_model": "trained",
}

__all__ = ["TrainedSparseModel", "drive", "prepare", "sparse_predictor", "trained_model"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
