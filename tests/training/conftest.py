"""Fixtures of runs; see `training_runs`."""

from training_runs import home  # noqa: F401
