"""Search for the best parameters of a job and of its run, with Optuna as the engine.

study_file    what a study is: its TOML file, read strictly
space         parameters, their domains, and the job that follows from chosen values
folder        the folder of a study: Optuna storage, status, lock, requests to end a trial
sampling      samplers and pruners; suggestions that depend on the seed and the trials alone
prediction    time and cost of a trial before its start
trial         one trial: events of its run as values of Optuna, and when it ends early
engine        trials side by side under one concurrency, budget and deadline
kind          a study as a run of kind `study`: header, events, result; what `attach`, `resume`, `stop` and `report` do
study         `Study`: open, run, attach, results
results       table, best job file; pictures: parallel coordinates and importances
siren         functions of one run chosen epoch by epoch by a learned policy

Names are imported when they are first used. `pip install 'ephemeron[tuning]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.tuning.study import Study

__all__ = ["Study"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ephemeron.tuning' has no attribute {name!r}")
    from ephemeron.tuning import study

    return getattr(study, name)
