"""Results of a worker: of one invocation, and of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ephemeron.events import Traffic
from ephemeron.runs.metrics import Metrics
from ephemeron.training.worker.recovery.lease import Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run, as rank 0 knows it."""

    iterations: int
    """Iterations of the whole run."""
    metrics: Metrics
    weights_sha256: str | None = None
    """Digest of the weights; None: no function holds the whole model."""

    def to_json(self) -> dict[str, object]:
        """Plain JSON, without a digest that is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """Result of one invocation that ended in good order."""

    outcome: Exit
    traffic: Traffic
    """Channel operations of the invocation."""
    summary: RunResult | None = None
    """Result of the run, where this invocation has closed it."""
