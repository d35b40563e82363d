"""What a placement does, replayed exactly: the values that the judge returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Pass, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpan:
    """One task from start to end."""

    resource: str | tuple[str, str]
    """A device, or a link as (source, target)."""
    what: str
    """The node, or the tensor that is sent."""
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
    """Busy seconds per micro-batch of the busiest device or link: no schedule delivers micro-batches faster."""
    busy_s: Mapping[str | tuple[str, str], float]
    """Of each device and link, over the whole iteration."""
    stages: tuple[str, ...]
    """Devices in the order of the pipeline; empty: tensors go to and fro, so there is none."""
    in_flight: Mapping[str, int]
    """Micro-batches that may be under way on a device."""
    peak_bytes: Mapping[str, int]
    """Most that was held at once, by device."""
    reserved_bytes: Mapping[str, int]
    """Equation 5-18 for as many micro-batches as may be in flight: what a device needs that frees nothing early."""
    over_bytes: Mapping[str, int]
    """By how much `reserved_bytes` passes a device's memory; empty: the placement fits."""
    spans: tuple[ReplaySpan, ...]
    """In the order in which tasks began."""

    @property
    def fits(self) -> bool:
        return not self.over_bytes

    def orders(self) -> DeviceOrders:
        """The orders that were followed, of the first micro-batch."""
        compute: dict[str, list[Task]] = {}
        transfers: dict[tuple[str, str], list[Task]] = {}
        for span in self.spans:
            if span.micro_batch == 0:
                if isinstance(span.resource, str):
                    compute.setdefault(span.resource, []).append(span.task)
                else:
                    transfers.setdefault(span.resource, []).append(span.task)
        return DeviceOrders(
            compute={d: tuple(tasks) for d, tasks in compute.items()},
            transfers={k: tuple(tasks) for k, tasks in transfers.items()},
        )
