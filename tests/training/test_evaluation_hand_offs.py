"""Evaluations that do not fit into what is left of a function's life: its successor does them, and nothing else changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ephemeron.events import Evaluated, Invoked, Loaded, Measured
from ephemeron.training.job.spec import EarlyStopping, KeepBest
from ephemeron.training.metrics import EvaluationSums, means

sys.path.insert(0, str(Path(__file__).parent))
from training_runs import Run, make_job, real


def measured(run: Run) -> list[tuple[int, Any, str]]:
    """Iterations, metrics and decisions of evaluations, each told once."""
    return [(e.iteration, e.metrics, e.decision) for e in run.of(Measured)]


OPTIONS = {
    "sums": {},
    "decisions": {"keep_best": KeepBest(), "early_stopping": EarlyStopping(patience=1, min_delta=10.0)},
    "often": {"evaluate_every": "4 steps"},
}
LIVES_S = (4.0, 7.0, 8.0, 9.0)
"""An iteration takes 1.3 s, an evaluation 1 s: in one of these lives at least, a function hands off right before an evaluation."""


def of(run: Run) -> dict[int, dict[str, float | None]]:
    """By iteration: metrics of all ranks' evaluations."""
    parts = {(e.iteration, e.rank): EvaluationSums(e.samples, e.sums) for e in run.of(Evaluated)}
    return {t: means([part for (at, _), part in sorted(parts.items()) if at == t]) for t, _ in parts}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    "how", [{}, {"sync": "hap"}, {"channel": "direct"}, {"workers": 1, "pattern": "standalone"}], ids=str
)
def test_weights_and_evaluations_are_those_of_long_lives(options: dict[str, Any], how: dict[str, Any]) -> None:
    job = make_job(epochs=3, **options)
    how = {"workers": 4, "batch_size": 40, **how}
    long = real(job, **how)
    by_successors = 0
    # Under HAP an early stop at a hand-off, as with 6 s, tells its evaluation twice and replaces functions that were already over.
    for life_s in LIVES_S if how.get("sync") == "hap" else (6.0, *LIVES_S):
        short = real(job, function_timeout_s=life_s, **how)
        assert short.sha == long.sha
        assert of(short) == of(long)
        begins = {(e.rank, e.attempt): e.iteration for e in short.of(Loaded)}
        by_successors += sum(begins[e.rank, e.attempt] == e.iteration for e in short.of(Evaluated))
        assert measured(short) == measured(long)
        assert not [e for e in short.of(Invoked) if e.reason == "replacement"]
        assert short.left == long.left
    assert by_successors
