"""The client's part of a run: preparation, launch, supervision, metering and result."""

from ephemeron.training.driver.api import attach, configure, dry_run, resume, stop, train
from ephemeron.training.driver.result import Result

__all__ = ["Result", "attach", "configure", "dry_run", "resume", "stop", "train"]
