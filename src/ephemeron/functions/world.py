"""Parameters of the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ephemeron.config.typed import AtLeast, Count, NonNegative, Positive, Typed, Within


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel(Typed):
    """Seconds of a training step, FasDL equation 3-12: a·(B + b)/(M + m) for B samples and M MB of memory."""

    a: NonNegative
    """s·MB per sample."""
    b: NonNegative
    """Samples."""
    m: Annotated[float, AtLeast(-1e6)]
    """MB; negative where a part of the memory quota brings no CPU share."""

    def seconds(self, samples: float, memory_mb: float) -> float:
        """Seconds of a step over so many samples at this memory quota."""
        return self.a * (samples + self.b) / (memory_mb + self.m)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionBlackout(Typed):
    """A time in which a region does not reach the store that regions share."""

    region: str
    """Name of the region."""
    start_s: NonNegative
    """Seconds from the beginning of the run."""
    seconds: Positive
    """Its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSlowdown(Typed):
    """A time in which the functions of a region compute more slowly."""

    region: str
    """Name of the region."""
    start_s: NonNegative
    """Seconds from the beginning of the run."""
    seconds: Positive
    """Its length."""
    factor: Positive
    """Time of a computation relative to that without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Typed):
    """Latencies, bandwidth and compute of `--platform simulated`. Defaults: approximately AWS Lambda with S3."""

    latency_s: NonNegative = 0.03
    """Seconds per channel request before its first byte."""
    bandwidth_mb_s: Positive = 70.0
    """MB/s of one function in each direction (FuncPipe's figure for AWS Lambda)."""
    region_latency_s: NonNegative | None = None
    """Seconds per request to the store that regions share; None: `latency_s`."""
    region_bandwidth_mb_s: Positive | None = None
    """MB/s of one function in each direction to the store that regions share; None: `bandwidth_mb_s`."""
    region_blackouts: tuple[RegionBlackout, ...] = ()
    """Times in which one region reaches no other one; its requests and their answers arrive afterwards."""
    region_slowdowns: tuple[RegionSlowdown, ...] = ()
    """Times in which the functions of one region compute more slowly."""
    cold_start_s: NonNegative = 1.5
    """Seconds from an invocation to its first instruction in a new process."""
    warm_start_s: NonNegative = 0.05
    """The same in a process that has served an invocation before."""
    straggler_sigma: NonNegative = 0.0
    """Log-normal spread of compute time, per iteration and rank, seeded."""
    compute: ComputeModel | None = None
    """Time of a training step. None: CPU seconds of one thread of this machine, scaled by the CPU share."""
    concurrency: Count = 1000
    """Functions that may run at once; AWS Lambda's default quota."""
    direct_latency_s: NonNegative = 0.0005
    """Seconds from one function to another without the store, as in one data centre."""
    direct_bandwidth_mb_s: Positive | None = None
    """MB/s that one function sends to others; None: `bandwidth_mb_s`."""
    direct_setup_s: NonNegative = 0.0
    """Seconds to connect two functions, beside the turns of their greeting."""
    direct_failure: Annotated[float, Within(0, 1)] = 0.0
    """Share of the pairs of ranks that cannot connect, seeded; they exchange through a third one, else through the store."""
