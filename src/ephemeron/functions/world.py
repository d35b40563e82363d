"""Parameters of the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from ephemeron.config.typed import Typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Typed):
    """Latencies, bandwidth and compute of `--platform simulated`. Defaults: approximately AWS Lambda with S3."""

    latency_s: float = 0.03
    """Seconds per channel request before its first byte."""
    bandwidth_mb_s: float = 70.0
    """MB/s of one function in each direction (FuncPipe's figure for AWS Lambda)."""
    cold_start_s: float = 1.5
    warm_start_s: float = 0.05
    straggler_sigma: float = 0.0
    """Log-normal spread of compute time, per iteration and rank, seeded."""
    compute: dict[str, float] | None = None
    """`{a, b, m}` of FasDL equation 3-12: seconds = a·(B+b)/(M+m). None: CPU seconds of one thread of this machine, scaled by
    the CPU share."""
    concurrency: int = 1000
    """Functions that may run at once; AWS Lambda's default quota."""
