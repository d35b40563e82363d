"""Results of a simulation as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Pass, Task


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
