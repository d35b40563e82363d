"""Train machine-learning models on serverless functions.

    import ephemeron

    job = ephemeron.load_job("job.toml")
    print(ephemeron.plan_job(job).choice)                                             # measured, searched, proven
    result = ephemeron.train(job, ephemeron.configure(job, workers=4, sync="hap"))    # or chosen by hand
    print(result.summary["metrics"])

Names are imported when they are first used: a function that starts cold pays for every import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.errors import EphemeronError, JobError, PlanInfeasible, RunFailed, UserError
    from ephemeron.job import Configuration, DataSpec, Fault, Job, JobLimits, Simulation, Target, load_job
    from ephemeron.performance.profile import Profile, load_profile
    from ephemeron.planning import Plan, load_plan
    from ephemeron.profiling import profile_job
    from ephemeron.training import Result, attach, configure, plan_job, resume, stop, train

_LAZY = {
    "Configuration": "job", "DataSpec": "job", "Fault": "job", "Job": "job", "JobLimits": "job", "Simulation": "job",
    "Target": "job", "load_job": "job",
    "Result": "training", "attach": "training", "configure": "training", "resume": "training", "stop": "training",
    "train": "training", "plan_job": "training", "profile_job": "profiling", "Plan": "planning", "load_plan": "planning",
    "Profile": "performance.profile", "load_profile": "performance.profile",
    "EphemeronError": "errors", "JobError": "errors", "PlanInfeasible": "errors", "RunFailed": "errors",
    "UserError": "errors",
}  # fmt: skip

__all__ = [
    "Configuration",
    "DataSpec",
    "EphemeronError",
    "Fault",
    "Job",
    "JobError",
    "JobLimits",
    "Plan",
    "PlanInfeasible",
    "Profile",
    "Result",
    "RunFailed",
    "Simulation",
    "Target",
    "UserError",
    "attach",
    "configure",
    "load_job",
    "load_plan",
    "load_profile",
    "plan_job",
    "profile_job",
    "resume",
    "stop",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ephemeron' has no attribute {name!r}")
    return getattr(import_module(f"ephemeron.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
