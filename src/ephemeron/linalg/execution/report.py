"""What a computation did: tasks, time, bytes, cost."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LinalgReport:
    """Figures of a computation, all of them measured but the cost, which is at list prices."""

    algorithm: str
    tasks: int = 0
    seconds: float = 0.0
    """From the call to the last result."""
    core_seconds: float = 0.0
    """Seconds that tasks computed, times the vCPUs of a function."""
    bytes_read: int = 0
    """By tasks, those of cached tiles included."""
    bytes_written: int = 0
    """Tiles that tasks stored."""
    cost_usd: float = 0.0
    """Of functions and requests so far: for local functions, what a cloud's would cost."""
    resumed: int = 0
    """Tasks whose tiles were there from an earlier run."""

    def __add__(self, other: LinalgReport) -> LinalgReport:
        """Figures of two computations, one after the other, under the name of the first."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "algorithm"}
        return replace(self, **sums)

    def __str__(self) -> str:
        resumed = f" ({self.resumed} of them from an earlier run)" if self.resumed else ""
        return (
            f"{self.algorithm}: {self.tasks} task{'s' * (self.tasks != 1)}{resumed} in {self.seconds:.2f} s, {self.core_seconds:.2f} core-seconds; "
            f"{self.bytes_read / 1e6:.1f} MB read, {self.bytes_written / 1e6:.1f} MB written; ${self.cost_usd:.6f}"
        )
