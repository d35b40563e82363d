"""Options that sparse jobs do not have: refused by name, so that none is ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ephemeron.errors import JobError
from ephemeron.training.job.faults import Fault
from ephemeron.training.job.run_options import values_of
from ephemeron.training.job.spec import Configuration, Job, TrainingOptions

_OWN = frozenset(
    (
        "platform",
        "channel",
        "workers",
        "memory_mb",
        "memory_is_default",
        "batch_size",
        "function_timeout_s",
        "nonaggregator_batch_size",
        "aggregators",
        "exchange.quantity",
    )
)
"""Options of a run that mean something to a sparse job, or that `resolved` sets."""
_OF_PROGRAMS = ("loss", "optimizer", "init", "code_include", "code_exclude", "dtype")


def refuse_for_sparse_jobs(job: Job, c: Configuration, *, faults: Sequence[Fault] = ()) -> None:
    """Refuses what a sparse job does not have.

    Raises:
        JobError: names the key.
    """
    usual, defaults = TrainingOptions(), {f.name: f for f in dataclasses.fields(Job)}
    for f in dataclasses.fields(usual):
        if getattr(job, f.name) != getattr(usual, f.name):
            raise _foreign(f.name)
    for name in _OF_PROGRAMS:
        f = defaults[name]
        usual_value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if getattr(job, name) != usual_value:
            raise _foreign(name, "say it in [sparse]" if name == "optimizer" else "leave it out")
    if job.limits.max_global_batch is not None:
        raise _foreign("limits.max_global_batch")
    refuse_runs(c)
    if faults:
        raise JobError("faults cannot be injected into a sparse job", remedy="leave --fault out")


def refuse_runs(c: Configuration) -> None:
    """Refuses options of a run that a sparse job does not have.

    Raises:
        JobError: names the option.
    """
    if c.platform == "simulated":
        raise JobError("a sparse job cannot be simulated", remedy="use platform local, or a cloud's")
    usual = values_of(Configuration().resolved())
    for name, value in values_of(c).items():
        if name not in _OWN and (name not in usual or value != usual[name]):
            raise _foreign(f"run.{name}")
    if c.direct:
        raise _foreign(f"channel '{c.channel}'", "functions are connected to the shards anyway; leave it out")


def _foreign(name: str, remedy: str = "leave it out") -> JobError:
    return JobError(f"{name} is not for a sparse job", remedy=remedy)
