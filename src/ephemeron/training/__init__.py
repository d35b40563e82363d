"""The trigger: plan, prepare, launch, supervise, meter, report."""

from ephemeron.training.api import attach, configure, resume, stop, train
from ephemeron.training.planned import plan_job
from ephemeron.training.result import Result

__all__ = ["Result", "attach", "configure", "plan_job", "resume", "stop", "train"]
