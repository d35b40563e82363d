"""Train machine-learning models on serverless functions.

    import ephemeron

    job = ephemeron.load_job("job.toml")
    print(ephemeron.plan_job(job).choice)                                             # measured, searched, proven
    result = ephemeron.train(job, ephemeron.configure(job, workers=4, sync="hap"))    # or chosen by hand
    print(result.summary.metrics)
    model = result.model()

Names are imported when they are first used: a function that starts cold pays for every import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.errors import EphemeronError, JobError, PlanInfeasible, RunFailed, UserError
    from ephemeron.executor import FunctionExecutor
    from ephemeron.maps.groups.fitting import fit_groups
    from ephemeron.maps.groups.predicting import predict_groups
    from ephemeron.maps.partitions.mapping import map_partitions
    from ephemeron.runs.verbs import attach, resume, stop
    from ephemeron.training.driver import Result, Session, configure, launch, resize, train, train_async
    from ephemeron.training.job import Configuration, DataSpec, Fault, Job, JobLimits, Simulation, Target, load_job
    from ephemeron.training.job.generation import Resize
    from ephemeron.training.planner import Plan, load_plan
    from ephemeron.training.planner.model.profile import Profile, load_profile
    from ephemeron.training.planning_workflow import plan_job
    from ephemeron.training.profiling import profile_job
    from ephemeron.training.task.schedule import EpochMeasurements, Schedule
    from ephemeron.training.task.script import current
    from ephemeron.training.task.task import Task
    from ephemeron.tuning.api import tune
    from ephemeron.tuning.objective_call import TrialPruned

_LAZY = {
    "executor": ("FunctionExecutor",),
    "maps.groups.fitting": ("fit_groups",),
    "maps.groups.predicting": ("predict_groups",),
    "maps.partitions.mapping": ("map_partitions",),
    "training.job": ("Configuration", "DataSpec", "Fault", "Job", "JobLimits", "Simulation", "Target", "load_job"),
    "runs.verbs": ("attach", "resume", "stop"),
    "training.driver": ("Result", "Session", "configure", "launch", "resize", "train", "train_async"),
    "training.task.task": ("Task",),
    "training.task.script": ("current",),
    "training.task.schedule": ("EpochMeasurements", "Schedule"),
    "training.job.generation": ("Resize",),
    "training.planning_workflow": ("plan_job",),
    "training.planner": ("Plan", "load_plan"),
    "training.profiling": ("profile_job",),
    "training.planner.model.profile": ("Profile", "load_profile"),
    "tuning.api": ("tune",),
    "tuning.objective_call": ("TrialPruned",),
    "errors": ("EphemeronError", "JobError", "PlanInfeasible", "RunFailed", "UserError"),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}

__all__ = [
    "Configuration",
    "DataSpec",
    "EphemeronError",
    "EpochMeasurements",
    "Fault",
    "FunctionExecutor",
    "Job",
    "JobError",
    "JobLimits",
    "Plan",
    "PlanInfeasible",
    "Profile",
    "Resize",
    "Result",
    "RunFailed",
    "Schedule",
    "Session",
    "Simulation",
    "Target",
    "Task",
    "TrialPruned",
    "UserError",
    "attach",
    "configure",
    "current",
    "fit_groups",
    "launch",
    "load_job",
    "load_plan",
    "load_profile",
    "map_partitions",
    "plan_job",
    "predict_groups",
    "profile_job",
    "resize",
    "resume",
    "stop",
    "train",
    "train_async",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ephemeron' has no attribute {name!r}")
    return getattr(import_module(f"ephemeron.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
