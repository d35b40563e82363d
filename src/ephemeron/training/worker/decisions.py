"""Decisions that follow from evaluations: the end of a run that improves no more, and the weights that are kept. Pure.

Every rank takes the same metrics and decides alike. The state is part of every checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ephemeron.errors import JobError
from ephemeron.runs.metrics import Metrics
from ephemeron.training.job import TrainingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """Weights of one evaluation."""

    iteration: int
    """Iterations computed before it."""
    value: float | None = None
    """Metric by which they are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionState:
    """What was decided so far."""

    best: float | None = None
    """Best value of the metric of early stopping."""
    without_improvement: int = 0
    """Evaluations since then."""
    best_weights: tuple[KeptWeights, ...] = ()
    """Best first."""
    last_weights: tuple[KeptWeights, ...] = ()
    """Oldest first."""

    @property
    def kept(self) -> tuple[int, ...]:
        """Iterations whose weights are kept, ascending."""
        return tuple(sorted({k.iteration for k in (*self.best_weights, *self.last_weights)}))

    @property
    def best_iteration(self) -> int | None:
        """Iteration of the best weights; None: none are kept."""
        return self.best_weights[0].iteration if self.best_weights else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from one evaluation."""

    state: DecisionState
    stop: str = ""
    """Why the run ends; empty: it goes on."""


def decide(options: TrainingOptions, state: DecisionState, metrics: Metrics, iteration: int) -> Decision:
    """Takes one evaluation into account.

    Args:
        options: of the job.
        state: before it.
        metrics: of the whole evaluation data.
        iteration: iterations computed before it.

    Raises:
        JobError: a monitored metric is not among the metrics.
    """
    stop = ""
    early, best, last = options.early_stopping, options.keep_best, options.keep_last
    if early is not None:
        value = monitored(metrics, early.monitor, "early_stopping")
        sign = 1 if early.mode == "min" else -1
        improved = value is not None and (state.best is None or sign * (state.best - value) > early.min_delta)
        if improved:
            state = replace(state, best=value, without_improvement=0)
        else:
            state = replace(state, without_improvement=state.without_improvement + 1)
            if state.without_improvement >= early.patience:
                stop = f"{early.monitor} has not improved in {early.patience} evaluations"
        if value is not None and early.threshold is not None and sign * (value - early.threshold) <= 0:
            stop = f"{early.monitor} = {value:.6g} has reached {early.threshold:g}"
    if best is not None:
        value = monitored(metrics, best.monitor, "keep_best")
        sign = 1 if best.mode == "min" else -1
        if value is not None:
            among = [*state.best_weights, KeptWeights(iteration=iteration, value=value)]
            among.sort(key=lambda k: (sign * (k.value or 0.0), k.iteration))
            state = replace(state, best_weights=tuple(among[: best.count]))
    if last:
        among = [*state.last_weights, KeptWeights(iteration=iteration)]
        state = replace(state, last_weights=tuple(among[-last:]))
    return Decision(state=state, stop=stop)


def monitored(metrics: Metrics, name: str, where: str) -> float | None:
    """A metric by name; None where it is not finite.

    Raises:
        JobError: the evaluation does not report it.
    """
    if name not in metrics:
        raise JobError(f"{where} monitors {name!r}, which the evaluation does not report", remedy=f"monitor one of {', '.join(metrics)}")
    return metrics[name]
