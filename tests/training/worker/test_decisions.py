"""Decisions that follow from evaluations."""

from __future__ import annotations

import pytest

from ephemeron.training.job import EarlyStopping, TrainingOptions
from ephemeron.training.worker.decisions import DecisionState, decide


@pytest.mark.parametrize(
    ("mode", "values", "stops"),
    [
        ("min", [0.9, 0.5, 0.3], ["", "", "loss = 0.3 has reached 0.3"]),
        ("max", [0.1, 0.31, 0.2], ["", "loss = 0.31 has reached 0.3", ""]),
        ("min", [None, 0.4, 0.41], ["", "", ""]),
    ],
)
def test_a_metric_that_reaches_the_threshold_ends_the_run(mode, values, stops):
    options = TrainingOptions(early_stopping=EarlyStopping(mode=mode, threshold=0.3, patience=5))
    state, said = DecisionState(), []
    for i, value in enumerate(values):
        decision = decide(options, state, {"loss": value}, i)
        state, said = decision.state, [*said, decision.stop]
    assert said == stops
