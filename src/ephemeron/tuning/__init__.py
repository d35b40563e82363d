"""Search for the best parameters of a job and of its run, or of any Python function, with Optuna as the engine.

study_file    what a study is: its TOML file, read strictly
space         parameters, their domains, and the job that follows from chosen values
objective     a Python function that is searched: its table in the file, and how it is called
objective_call   one call of it, where it runs
folder        the folder of a study: Optuna storage, status, lock, requests to end a trial
sampling      samplers and pruners; suggestions that depend on the seed and the trials alone
prediction    time and cost of a trial before its start
trial         one trial: what it reports as values of Optuna, and when it ends early
trials        the port by which the engine knows how trials take place: `job_trials` as runs, `objective_trials` as tasks
engine        trials side by side under one concurrency, budget and deadline
job_subject, objective_subject   what is checked, predicted and recorded of a study before its trials
kind          a study as a run of kind `study`: header, events, result; what `attach`, `resume`, `stop` and `report` do
study         `Study`: open, run, attach, results
api           `tune`: a study of a function, without a file
results       table, best job file; pictures: parallel coordinates and importances
siren         functions of one run chosen epoch by epoch by a learned policy

Names are imported when they are first used. `pip install 'ephemeron[tuning]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.tuning.api import tune
    from ephemeron.tuning.objective_call import Trial, TrialPruned
    from ephemeron.tuning.study import Study

_HOME = {"Study": "study", "Trial": "objective_call", "TrialPruned": "objective_call", "tune": "api"}

__all__ = ["Study", "Trial", "TrialPruned", "tune"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ephemeron.tuning' has no attribute {name!r}")
    return getattr(import_module(f"ephemeron.tuning.{_HOME[name]}"), name)
