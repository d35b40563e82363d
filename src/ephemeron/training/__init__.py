"""The trigger: prepare, launch, supervise, meter, report."""

from ephemeron.training.api import Result, attach, configure, resume, stop, train

__all__ = ["Result", "attach", "configure", "resume", "stop", "train"]
