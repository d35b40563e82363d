"""The client's side of a run: prepare, launch, supervise, meter, conclude."""

from ephemeron.training.driver.api import attach, configure, resume, stop, train
from ephemeron.training.driver.result import Result

__all__ = ["Result", "attach", "configure", "resume", "stop", "train"]
