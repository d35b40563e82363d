"""Loggers: programs that record runs, behind one port. They run on the client and see what its event stream says.

logger          `Logger`, the port
csv_logs        comma-separated files, without any dependency
tensorboard     TensorBoard event files
mlflow          MLflow, on a tracking server or in a database
wandb           Weights & Biases, online or offline
registry        loggers by name

Functions know nothing of loggers: they need no credentials, no packages and no time for them. `driver.run_logging` turns
events into calls of loggers.
"""

from ephemeron.training.loggers.logger import LoggedRun, Logger, Param, Status
from ephemeron.training.loggers.registry import make_logger

__all__ = ["LoggedRun", "Logger", "Param", "Status", "make_logger"]
