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
kind          the kind `sparse`, through which `training` and `tuning` prepare, drive, predict and load such runs
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ephemeron.sparse.job.evaluation import TrainedSparseModel, trained_model

_MODULES = {"TrainedSparseModel": "evaluation", "trained_model": "evaluation"}

__all__ = ["TrainedSparseModel", "trained_model"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
