"""Data-parallel training on functions: jobs, planning, the worker and its collectives, and the driver that runs them.

Names are imported when they are first used: a function imports `training.worker`, and neither the driver nor the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.training.driver import Result, configure, resize, train
    from ephemeron.training.job.generation import Resize
    from ephemeron.training.planning_workflow import plan_job
    from ephemeron.training.task.schedule import EpochMeasurements, Schedule

_ELSEWHERE = {
    "plan_job": "planning_workflow",
    "Resize": "job.generation",
    "Schedule": "task.schedule",
    "EpochMeasurements": "task.schedule",
}
__all__ = ["EpochMeasurements", "Resize", "Result", "Schedule", "configure", "plan_job", "resize", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'driver')}"), name)
