"""Time by stage: how long the trainer waited, and which stage limits the flow. Pure.

Loaders work in parallel, so a stage limits the flow if it takes the largest part of the loaders' time while the trainer waits; if
the trainer hardly waits, no stage does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ephemeron.data.flow.sample_loader import COLLATE, NETWORK, READ, StageTimings

HARDLY = 0.05
"""Part of the time up to which waiting does not matter."""


@dataclass(slots=True)
class FlowCounters:
    """Counters of the iterations over a flow, so far."""

    batches: int = 0
    samples: int = 0
    """Samples delivered."""
    skipped: int = 0
    """Samples that failed and were skipped."""
    retried: int = 0
    lost_loaders: int = 0
    """Loader processes that died; the samples that they were loading were loaded again."""
    waited_s: float = 0.0
    """Time that the trainer waited for batches."""
    elapsed_s: float = 0.0
    """Time since the first request, the trainer's own work included."""
    loading: StageTimings = field(default_factory=StageTimings)
    """Time of all loaders together, by stage."""
    loaders: int = 0

    @property
    def waiting(self) -> float:
        """Share of the elapsed time that the trainer waited."""
        return self.waited_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def bound_by(self) -> str | None:
        """The stage that takes most of the loaders' time, if the trainer waits; None: the trainer is the limit."""
        if self.waiting <= HARDLY or not self.loading.by_stage:
            return None
        return max(self.loading.by_stage, key=lambda stage: self.loading.by_stage[stage])

    def advice(self) -> str:
        """Advice in one sentence."""
        stage = self.bound_by()
        if stage is None:
            return f"The trainer waited {self.waiting:.0%} of the time: loading does not hold it up."
        part = self.loading.by_stage[stage] / max(sum(self.loading.by_stage.values()), 1e-12)
        head = f"The trainer waited {self.waiting:.0%} of the time; {stage!r} takes {part:.0%} of loading: "
        if stage == READ:
            return head + "add loaders (reading waits for the store), or move the data closer."
        if stage == COLLATE:
            return head + "simplify collate_fn, or collate to one array per batch."
        if stage == NETWORK:
            return head + "send less: map to smaller dtypes, or run loaders closer."
        return head + "add loaders, make that step cheaper, or mark it can-cache if it draws no random numbers."

    def to_dict(self) -> dict[str, object]:
        """The counters as JSON, rounded."""
        return {
            "batches": self.batches,
            "samples": self.samples,
            "skipped": self.skipped,
            "retried": self.retried,
            "lost_loaders": self.lost_loaders,
            "loaders": self.loaders,
            "waited_s": round(self.waited_s, 6),
            "elapsed_s": round(self.elapsed_s, 6),
            "waiting": round(self.waiting, 4),
            "bound_by": self.bound_by(),
            "stages_s": {k: round(v, 6) for k, v in sorted(self.loading.by_stage.items())},
            "advice": self.advice(),
        }
