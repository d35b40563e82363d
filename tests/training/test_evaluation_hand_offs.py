"""Evaluations that do not fit into what is left of a function's life: its successor does them, and nothing else changes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ephemeron.events import Evaluated, Invoked, Loaded, Measured
from ephemeron.runs.metrics import EvaluationSums, means
from ephemeron.training.job.spec import EarlyStopping, KeepBest
from random_schedules import seeds

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
# Under HAP an early stop at a hand-off, as with 6 s, tells its evaluation twice and replaces functions that were already over.
HOW: list[tuple[dict[str, Any], tuple[float, ...]]] = [
    ({}, (6.0, 7.0, 8.0, 4.0, 9.0)),
    ({"sync": "hap"}, (8.0, 7.0, 9.0, 4.0)),
    ({"channel": "direct"}, (9.0, 7.0, 8.0, 4.0, 6.0)),
    ({"workers": 1, "pattern": "standalone"}, (6.0, 4.0, 9.0, 7.0, 8.0)),
]
"""And lives of functions: an iteration takes 1.3 s, an evaluation 1 s. In the first or the fourth of them a function hands off right before one."""


def of(run: Run) -> dict[int, dict[str, float | None]]:
    """By iteration: metrics of all ranks' evaluations."""
    parts = {(e.iteration, e.rank): EvaluationSums(e.samples, e.sums) for e in run.of(Evaluated)}
    return {t: means([part for (at, _), part in sorted(parts.items()) if at == t]) for t, _ in parts}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("how", "lives_s"), HOW, ids=str)
def test_weights_and_evaluations_are_those_of_long_lives(options: dict[str, Any], how: dict[str, Any], lives_s: tuple[float, ...]) -> None:
    job = make_job(epochs=3 if "early_stopping" in options else 2, **options)
    how = {"workers": 4, "batch_size": 40, **how}
    long = real(job, **how)
    by_successors = 0
    for life_s in seeds(lives_s, 3):
        short = real(job, function_timeout_s=life_s, **how)
        assert short.sha == long.sha
        assert of(short) == of(long)
        begins = {(e.rank, e.attempt): e.iteration for e in short.of(Loaded)}
        by_successors += sum(begins[e.rank, e.attempt] == e.iteration for e in short.of(Evaluated))
        assert measured(short) == measured(long)
        assert not [e for e in short.of(Invoked) if e.reason == "replacement"]
        assert short.left == long.left
    assert by_successors
