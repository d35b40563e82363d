"""Where a job's samples come from, as a frozen value."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ephemeron.config.typed import Typed
from ephemeron.errors import JobError

_ON_ERROR = re.compile(r"fail|skip|retry:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec(Typed):
    """Where the samples come from."""

    source: str = "digits"
    """`digits`, `idx`, `cifar10`, `cifar100`, `npz`, or `module:function` that returns a Dataset."""
    path: Path | None = None
    """File or folder, for the sources that read one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the source."""
    test_fraction: float = 0.2
    """Share held out for testing where the source brings no test set of its own."""
    last_batch: Literal["keep", "drop", "merge"] = "keep"
    """What becomes of the smaller last batch of an epoch: it is trained on, dropped, or merged with the one before."""
    flow: str | None = None
    """`module:function` that returns a Flow, in place of `source`: functions read and map the samples themselves."""
    test_flow: str | None = None
    """The same for testing. Where both read one variant of a dataset, it reads the share that is held out."""
    collate: str | None = None
    """With a flow: `module:function` from a list of samples to `(inputs, targets)`; None: PyTorch's default."""
    on_error: str = "fail"
    """With a flow: `fail`, `skip`, or `retry:N` and then fail, where a sample cannot be loaded."""
    loaders: int = 1
    """With a flow: processes in each function that load ahead; 0: batches are loaded when they are asked for."""
    prefetch_mb: float = 64.0
    """With a flow: most MB that each function loads ahead; the next batch is loaded in any case."""


def check_data(data: DataSpec) -> None:
    """Refuses what cannot be meant, before anything is read.

    Raises:
        JobError: keys that exclude each other, or a value out of range.
    """
    usual = DataSpec()
    if not 0 <= data.test_fraction < 1:
        raise JobError(f"data.test_fraction = {data.test_fraction} is not in [0, 1)")
    if data.flow is None:
        for name in ("test_flow", "collate", "on_error", "loaders", "prefetch_mb"):
            if getattr(data, name) != getattr(usual, name):
                raise JobError(f"data.{name} = {getattr(data, name)!r} is for flows", remedy="give data.flow, too")
        return
    if data.source != usual.source:
        raise JobError(
            f"data.source = {data.source!r} and data.flow = {data.flow!r} exclude each other", remedy="leave one out"
        )
    if _ON_ERROR.fullmatch(data.on_error) is None:
        raise JobError(f"data.on_error = {data.on_error!r} is not known", remedy="use fail, skip or retry:N")
    if data.loaders < 0:
        raise JobError(f"data.loaders = {data.loaders} is below 0")
    if not 0 < data.prefetch_mb < math.inf:
        raise JobError(f"data.prefetch_mb = {data.prefetch_mb} should be a positive number")
