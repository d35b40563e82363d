"""How micro-batches follow one another, where each node lies, and in which order a device works. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ephemeron.errors import JobError

Pass = Literal["forward", "backward"]
Task = tuple[str, Pass]
"""A node, or a tensor that is sent, and which way: forward it is the tensor, backward its gradient."""
KINDS = ("plain", "gpipe", "1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What one iteration does.

    - `plain`: the whole batch at once, as NetSplit (equation 5-2).
    - `gpipe`: micro-batches; a device begins backward passes after all its forward passes, and keeps all of them in memory.
    - `1f1b`: micro-batches; backward passes first, and only so many micro-batches in flight on a device that the pipeline
      stays full.

    Work and bytes of a micro-batch are 1/M of the batch's; a link's latency is paid by each.

    Recomputing (GPipe, section 2.3; NetSplit does not) gives activations up for time. A stage keeps, for every micro-batch in flight,
    only what crosses its border, and inputs of the model; what lies inside is there for one micro-batch at a time, and is made again
    before its backward pass. So a stage works as one: it begins a pass when all it reads from others is there, and ends it before it
    begins another. That takes stages: placements in which tensors go to and fro cannot recompute.

    Raises:
        JobError: unknown kind, or a number of micro-batches that it does not allow.
    """

    kind: Literal["plain", "gpipe", "1f1b"] = "plain"
    micro_batches: int = 1
    """M."""
    overlap: bool = True
    """With 1f1b: stage s of S keeps 2(S−s)−1 micro-batches in flight, one more for each pair of links behind it, so that transfers
    hide behind computing where both directions together take no longer than the busiest stage. False: S−s, as PipeDream and
    Megatron, which keeps the pipeline full only where transfers take no time."""
    recompute: bool = False
    """Backward passes take the time of both, and activations inside a stage are there for one micro-batch only."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise JobError(f"schedule kind {self.kind!r} is not known", remedy=f"use one of {', '.join(KINDS)}")
        if self.micro_batches < 1:
            raise JobError(f"schedule: micro_batches = {self.micro_batches} should be a whole number from 1")
        if self.kind == "plain" and self.micro_batches != 1:
            raise JobError(
                f"schedule: plain takes the batch whole, not micro_batches = {self.micro_batches}",
                remedy="choose gpipe or 1f1b",
            )
        if self.kind == "plain" and self.recompute:
            raise JobError(
                "schedule: plain keeps one batch only, so recompute would save nothing", remedy="choose gpipe or 1f1b"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrders:
    """In which order devices compute and links send, for one batch (`plain`)."""

    compute: Mapping[str, tuple[Task, ...]]
    """By device: its nodes' passes."""
    transfers: Mapping[tuple[str, str], tuple[Task, ...]]
    """By (source, target): tensors going forward, and gradients of tensors going back to where those came from."""
