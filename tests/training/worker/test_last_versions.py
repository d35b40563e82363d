"""End of a run whose ranks run ahead: the last waits need not fit into one invocation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ephemeron.events import Invoked
from ephemeron.training.job import Simulation

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
from training_runs import synthetic


@pytest.mark.slow
@pytest.mark.parametrize("function_timeout_s", [pytest.param(3.6, marks=pytest.mark.slow), 4.4])
def test_short_invocations_hand_off_between_the_last_versions(function_timeout_s):
    """Iterations of 2.9 s: a rank that is one ahead waits for two versions, longer than a function lives."""
    world = Simulation(compute={"a": 2.8 * 1769 / 36, "b": 4.0, "m": 0.0})
    values = {"samples": 128 * 30, "epochs": 1, "elements": 250_000, "world": world, "workers": 4, "batch_size": 32}
    run, calm = (synthetic(sync="hap", function_timeout_s=life, **values) for life in (function_timeout_s, 900.0))
    assert run.sha == calm.sha
    assert not [e for e in run.of(Invoked) if e.reason == "replacement"]
