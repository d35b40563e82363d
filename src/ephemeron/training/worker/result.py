"""Results of a worker: of one invocation, of the run, and what rank 0 writes about the run beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ephemeron.config.typed import build
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.events import Traffic
from ephemeron.runs.metrics import Metrics
from ephemeron.training.worker.recovery.fencing import Exit


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalState:
    """Final state of a run."""

    iterations: int
    metrics: Mapping[str, float | None]
    """Means over the test set, by name."""
    weights_sha256: str | None = None
    """Digest of the weights; None where they are in parts."""
    parts: int = 0
    """Number of objects that hold the weights, one for each stage; 0: they are beside this."""
    kept: tuple[int, ...] = ()
    """Iterations of the evaluations whose weights are kept."""
    best: int | None = None
    """The best of them; None: the run keeps no best weights."""
    bf16: tuple[str, ...] = ()
    """Names of tensors that are bfloat16, stored as 16-bit integers."""

    @classmethod
    def read(cls, meta: Mapping[str, Any], *, key: str) -> FinalState:
        """The metadata of the object under `key`.

        Raises:
            CorruptMessage: it is not of this release.
        """
        try:
            return build(cls, meta, where="result")
        except JobError as e:
            raise CorruptMessage(str(e), key=key) from None
