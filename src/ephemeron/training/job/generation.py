"""Generations of a run: parts with fixed functions, memory, aggregators and batches. Pure.

A run begins with generation 0. At the first iteration of the next one all functions have applied the same versions; its members
begin from that common state. So the weights of a run are a function of its generations alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ephemeron.config.typed import AtLeast, Count, Typed
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Typed):
    """Values of a configuration that change; those that are None stay as they are."""

    workers: Count | None = None
    """W: number of functions."""
    memory_mb: Count | None = None
    """Quota of each function, MB."""
    aggregators: Count | None = None
    """K; None: as many as before, or W if there are fewer functions."""
    batch_size: Count | None = None
    """Samples per iteration of an aggregator."""
    nonaggregator_batch_size: Count | None = None
    """Samples per iteration of a non-aggregator; None: as `batch_size` if that is given."""

    @property
    def changes(self) -> dict[str, int]:
        """Names and values of what changes."""
        names = ("workers", "memory_mb", "aggregators", "batch_size", "nonaggregator_batch_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledResize(Resize):
    """A change of the functions at the beginning of an epoch: an entry of `[[run.resize.schedule]]`."""

    from_epoch: Annotated[int, AtLeast(1)]
    """First epoch with the new values, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(Typed):
    """Members of a generation, and where it begins."""

    number: int
    from_iteration: int
    from_epoch: int
    used_samples: int = 0
    """Samples of that epoch that earlier generations have used; 0: the generation begins with the epoch."""
    workers: Count
    memory_mb: int
    aggregators: Count
    batch_size: Count
    nonaggregator_batch_size: Count
    request: str = ""
    """Name of the request that led to it; empty: the job's schedule."""


def check_schedule(entries: Sequence[ScheduledResize], *, epochs: int) -> None:
    """Refuses a schedule that is not in order, goes beyond the run, or changes nothing.

    Raises:
        JobError: names the entry.
    """
    before = 0
    for entry in entries:
        where = f"schedule entry from_epoch = {entry.from_epoch}"
        if entry.from_epoch <= before:
            raise JobError(f"{where} is not after epoch {before}", remedy="list entries in the order of their epochs")
        if entry.from_epoch >= epochs:
            raise JobError(f"{where} is not among the epochs 0 to {epochs - 1} of the job", remedy="use an earlier epoch, or more epochs")
        if not entry.changes:
            raise JobError(f"{where} changes nothing", remedy="give workers, memory_mb, aggregators or batch_size")
        before = entry.from_epoch


def resized_values(resize: Resize, *, workers: int, aggregators: int, pattern: str) -> dict[str, int]:
    """Values of a configuration after a change, of those that change.

    Args:
        workers, aggregators: before the change.
        pattern: of the reduction, which may determine the number of aggregators.

    Raises:
        JobError: more aggregators than functions, or another number than the pattern has.
    """
    values = dict(resize.changes)
    if "batch_size" in values:
        values.setdefault("nonaggregator_batch_size", values["batch_size"])
    members = values.get("workers", workers)
    fixed = {"all-reduce": 1, "scatter-reduce": members}.get(pattern)
    usual = members if aggregators == workers else min(aggregators, members)
    k = values.setdefault("aggregators", fixed or usual)
    if fixed is not None and k != fixed:
        raise JobError(f"aggregators = {k} contradicts pattern '{pattern}', which has {fixed}", remedy="leave aggregators out")
    if k > members:
        raise JobError(f"aggregators = {k} is more than workers = {members}", remedy="aggregators are workers, too")
    return values
