"""Fixtures of studies; see `tuning_worlds`."""

from tuning_worlds import home, make_study  # noqa: F401
