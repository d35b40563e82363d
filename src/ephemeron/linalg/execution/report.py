"""What a computation did: tasks, time, bytes, cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinalgReport:
    """Figures of a computation, all of them measured but the cost, which is at list prices."""

    algorithm: str
    tasks: int
    seconds: float
    """From the call to the last result."""
    core_seconds: float
    """Seconds that tasks computed, times the vCPUs of a function."""
    bytes_read: int
    """By tasks, those of cached tiles included."""
    bytes_written: int
    """Tiles that tasks stored."""
    cost_usd: float
    """Of functions and requests so far: for local functions, what a cloud's would cost."""
    resumed: int = 0
    """Tasks whose tiles were there from an earlier run."""

    def __str__(self) -> str:
        resumed = f" ({self.resumed} of them from an earlier run)" if self.resumed else ""
        return (
            f"{self.algorithm}: {self.tasks} tasks{resumed} in {self.seconds:.2f} s, {self.core_seconds:.2f} core-seconds; "
            f"{self.bytes_read / 1e6:.1f} MB read, {self.bytes_written / 1e6:.1f} MB written; ${self.cost_usd:.6f}"
        )
