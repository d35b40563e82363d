"""The client's part of a run: preparation, launch, supervision, metering and result."""

from ephemeron.training.driver.api import attach, configure, dry_run, resize, resume, stop, train
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.session import Session, train_async

__all__ = ["Result", "Session", "attach", "configure", "dry_run", "resize", "resume", "stop", "train", "train_async"]
