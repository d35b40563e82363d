"""Decisions on a run's functions while it trains, made by the user's code at the end of each epoch."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError
from ephemeron.training.job import Target
from ephemeron.training.job.generation import Resize
from ephemeron.user_code import guarded, line_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMeasurements:
    """What is known of a run at the end of an epoch. Times are seconds, costs US dollars."""

    epoch: int
    """Epochs completed."""
    epochs: int
    """Epochs of the whole run."""
    iteration: int
    """Iterations completed."""
    run_s: float
    """Time since the launch of the run."""
    epoch_s: float
    """Duration of the epoch, or of what this function has seen of it."""
    iteration_s: float
    """Typical duration of an iteration."""
    spent_usd: float
    """Cost of the run so far, as rank 0 estimates it: its own cost times the number of functions, and functions that were started for
    later epochs."""
    loss: float
    """Mean training loss of rank 0's batches of the epoch."""
    fetch_s: float = 0.0
    """Seconds of the epoch in which rank 0 loaded data and merged parameters; transfers overlap other phases."""
    compute_s: float = 0.0
    """Seconds in which it computed."""
    update_s: float = 0.0
    """Seconds in which it uploaded contributions and merged those of others."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics of the last evaluation: of all ranks where functions merge them, else of rank 0's slice."""
    workers: int
    memory_mb: int
    aggregators: int
    batch_size: int
    nonaggregator_batch_size: int


class Schedule(ABC):
    """Decides after each epoch whether the functions of the run change.

    It runs on rank 0. A replacement of rank 0 makes a new object, so decisions should depend on the measurements alone.
    """

    @abstractmethod
    def decide(self, measured: EpochMeasurements) -> Resize | None:
        """The change that should begin as soon as the functions agree on it; None: nothing changes."""


Decide: TypeAlias = Callable[[EpochMeasurements], "Resize | None"]


def decision_of(target: Target, folders: list[Path]) -> Decide:
    """The decision function of a target: a `Schedule` class, or a function of `EpochMeasurements`.

    Raises:
        JobError: it cannot be imported or made, or is neither.
    """
    found: Any = resolve(target.target, folders)
    if not inspect.isclass(found):
        if not callable(found):
            raise JobError(f"resize.policy {target.target} is a {type(found).__name__}", remedy="name a class or a function")
        return partial(_checked, target.target, partial(found, **target.options))
    try:
        with guarded():
            made = found(**target.options)
    except Exception as e:
        raise JobError(f"resize.policy {target.target} raised {line_of(e)}") from e
    decide: Decide | None = getattr(made, "decide", None)
    if not callable(decide):
        raise JobError(f"resize.policy {target.target} has no method decide", remedy="derive it from ephemeron.Schedule")
    return partial(_checked, target.target, decide)


def _checked(name: str, decide: Decide, measured: EpochMeasurements) -> Resize | None:
    found: object = decide(measured)
    if found is not None and not isinstance(found, Resize):
        raise JobError(f"resize.policy {name} returned a {type(found).__name__}", remedy="return ephemeron.Resize(…) or None")
    return found
