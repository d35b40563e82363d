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

OPTIONS = {
    "sums": {},
    "decisions": {"keep_best": KeepBest(), "early_stopping": EarlyStopping(patience=1, min_delta=10.0)},
    "often": {"evaluate_every": "4 steps"},
}
LIFE_S = 4.0
"""An iteration takes 1.3 s, an evaluation 1 s."""


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
    short, long = real(job, function_timeout_s=LIFE_S, **how), real(job, **how)
    assert short.sha == long.sha
    assert of(short) == of(long)
    begins = {(e.rank, e.attempt): e.iteration for e in short.of(Loaded)}
    assert any(begins[e.rank, e.attempt] == e.iteration for e in short.of(Evaluated))  # by a successor
    assert [(e.iteration, e.metrics, e.decision) for e in short.of(Measured)] == [
        (e.iteration, e.metrics, e.decision) for e in long.of(Measured)
    ]
    assert not [e for e in short.of(Invoked) if e.reason == "replacement"]
    assert short.left == long.left
