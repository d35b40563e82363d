"""Schedules of micro-batches, and orders of tasks on devices and links, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ephemeron.errors import JobError

Pass = Literal["forward", "backward"]
Task = tuple[str, Pass]
"""A node, or a tensor that is sent, and the direction: forward for the tensor, backward for its gradient."""
KINDS = ("plain", "gpipe", "1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Schedule of one iteration.

    - `plain`: the whole batch at once, as in NetSplit (equation 5-2).
    - `gpipe`: micro-batches; a device begins backward passes after all its forward passes, and keeps all of them in memory.
    - `1f1b`: micro-batches; backward passes first, and no more micro-batches in flight on a device than keep the pipeline full.

    Work and bytes of a micro-batch are 1/M of the batch's; each transfer has the link's full latency.

    Recomputation (GPipe, section 2.3; not in NetSplit) saves memory and costs time. For every micro-batch in flight a stage keeps only
    the tensors that cross its boundary, and inputs of the model. Tensors inside the stage exist for one micro-batch at a time and are
    computed again before its backward pass. So a stage works as a unit: it begins a pass when all its inputs from other devices have
    arrived, and ends it before it begins another. This needs stages: placements in which tensors go in both directions between devices
    cannot recompute.

    Raises:
        JobError: unknown kind, or a number of micro-batches that it does not allow.
    """

    kind: Literal["plain", "gpipe", "1f1b"] = "plain"
    micro_batches: int = 1
    """M."""
    overlap: bool = True
    """Depth of 1f1b: stage s of S keeps 2(S−s)−1 micro-batches in flight, one more for each pair of links after it, so that transfers
    overlap with computation if both directions together take no longer than the busiest stage. False: S−s, as PipeDream and Megatron,
    which keeps the pipeline full only if transfers take no time."""
    recompute: bool = False
    """Backward passes take the time of both passes, and activations inside a stage are kept for one micro-batch only."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise JobError(f"schedule kind {self.kind!r} is not known", remedy=f"use one of {', '.join(KINDS)}")
        if self.micro_batches < 1:
            raise JobError(f"schedule: micro_batches = {self.micro_batches} should be a whole number from 1")
        if self.kind == "plain" and self.micro_batches != 1:
            raise JobError(
                f"schedule: plain takes the batch whole, not micro_batches = {self.micro_batches}", remedy="choose gpipe or 1f1b"
            )
        if self.kind == "plain" and self.recompute:
            raise JobError("schedule: plain keeps one batch only, so recompute would save nothing", remedy="choose gpipe or 1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrders:
    """Orders in which devices compute and links send, for one batch (`plain`)."""

    compute: Mapping[str, tuple[Task, ...]]
    """Passes of its nodes, by device."""
    transfers: Mapping[tuple[str, str], tuple[Task, ...]]
    """By (source, target): tensors, and gradients on the way back to their producers."""


# -- results of a simulation as values ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpan:
    """Start and end of one task."""

    resource: str | tuple[str, str]
    """A device, or a link as (source, target)."""
    what: str
    """Node, or tensor that is sent."""
    direction: Pass
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def task(self) -> Task:
        return self.what, self.direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One iteration, from the first forward pass to the last backward pass."""

    iteration_s: float
    bottleneck_s: float
    """Busy seconds per micro-batch of the busiest device or link; no schedule has a higher throughput."""
    busy_s: Mapping[str | tuple[str, str], float]
    """Busy seconds of each device and link, over the whole iteration."""
    stages: tuple[str, ...]
    """Devices in the order of the pipeline; empty: tensors go in both directions, so there is no pipeline."""
    in_flight: Mapping[str, int]
    """Most micro-batches in flight, by device."""
    peak_bytes: Mapping[str, int]
    """Maximum over time, by device."""
    reserved_bytes: Mapping[str, int]
    """Equation 5-18 for all micro-batches that may be in flight: the need of a device that frees nothing early."""
    over_bytes: Mapping[str, int]
    """Excess of `reserved_bytes` over a device's memory; empty: the placement fits."""
    spans: tuple[ReplaySpan, ...]
    """Spans by start."""

    @property
    def fits(self) -> bool:
        return not self.over_bytes

    def orders(self) -> DeviceOrders:
        """Orders of the first micro-batch."""
        compute: dict[str, list[Task]] = {}
        transfers: dict[tuple[str, str], list[Task]] = {}
        for span in self.spans:
            if span.micro_batch == 0:
                if isinstance(span.resource, str):
                    compute.setdefault(span.resource, []).append(span.task)
                else:
                    transfers.setdefault(span.resource, []).append(span.task)
        return DeviceOrders(
            compute={d: tuple(tasks) for d, tasks in compute.items()}, transfers={k: tuple(tasks) for k, tasks in transfers.items()}
        )
