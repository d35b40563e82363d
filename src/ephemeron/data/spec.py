"""Data source of a job, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from ephemeron.config.typed import AtLeast, Form, Positive, Typed, Within
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec(Typed):
    """Source of the samples."""

    source: str = "digits"
    """`digits`, `idx`, `cifar10`, `cifar100`, `npz`, `prepared`, `files`, or `module:function` that returns data (docs/flows.md)."""
    path: Path | None = None
    """File, folder or glob, for the sources that read one."""
    target_column: str | None = None
    """Column that is predicted, where samples are rows of named columns; the others are the inputs."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Passed to the source."""
    test_fraction: Annotated[float, Within(0, 1, open_maximum=True)] = 0.2
    """Share held out for testing where the source brings no test set of its own."""
    last_batch: Literal["keep", "drop", "merge"] = "keep"
    """Treatment of the smaller last batch of an epoch: trained on, dropped, or merged with the one before."""
    sampling: Literal["auto", "shares", "global"] = "auto"
    """`shares`: each function shuffles a share of the samples. `global`: all functions go through one order of all samples, so
    that batches do not depend on their number; each holds all samples, or their numbers of a flow. `auto`: shares for
    arrays, global for flows."""
    flow: str | None = None
    """`module:function` that returns a Flow, in place of `source`: functions read and map the samples themselves."""
    test_flow: str | None = None
    """The same for testing. Where both read one variant of a dataset, it reads the share that is held out."""
    collate: str | None = None
    """With a flow: `module:function` from a list of samples to `(inputs, targets)`; None: PyTorch's default."""
    on_error: Annotated[str, Form(r"fail|skip|retry:[0-9]+", "fail, skip or retry:N")] = "fail"
    """With a flow: `fail`, `skip`, or `retry:N` and then fail, where a sample cannot be loaded."""
    loaders: Annotated[int, AtLeast(0)] = 1
    """With a flow: processes in each function that load ahead; 0: batches are loaded when they are asked for."""
    prefetch_mb: Positive = 64.0
    """With a flow: most MB that each function loads ahead; the next batch is loaded in any case."""


def check_data(data: DataSpec) -> None:
    """Refuses keys that exclude each other, before anything is read.

    Raises:
        JobError: keys that exclude each other.
    """
    usual = DataSpec()
    if data.flow is None:
        for name in ("test_flow", "collate", "on_error", "loaders", "prefetch_mb"):
            if getattr(data, name) != getattr(usual, name):
                raise JobError(f"data.{name} = {getattr(data, name)!r} is for flows", remedy="give data.flow, too")
        if data.target_column is not None and ":" not in data.source and data.source != "files":
            raise JobError(
                f"data.target_column = {data.target_column!r} is for files and functions", remedy=f"leave it out: {data.source} has targets"
            )
        return
    if data.target_column is not None:
        raise JobError(
            f"data.target_column = {data.target_column!r} is for data.source", remedy="give it to the flow: dataset(…, target=…)"
        )
    if data.source != usual.source:
        raise JobError(f"data.source = {data.source!r} and data.flow = {data.flow!r} exclude each other", remedy="leave one out")
