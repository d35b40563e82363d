"""Loggers: programs that record runs, behind one port. They run on the client and see what its event stream says.

logger      `Logger`, the port
registry    CSV files, TensorBoard, MLflow and Weights & Biases, by name

Functions know nothing of loggers: they need no credentials, no packages and no time for them. `driver.run_logging` turns
events into calls of loggers.
"""

from ephemeron.training.loggers.logger import LoggedRun, Logger, Param, Status
from ephemeron.training.loggers.registry import make_logger

__all__ = ["LoggedRun", "Logger", "Param", "Status", "make_logger"]
