"""Steps smaller than those that were measured."""

import pytest

from ephemeron.training.planner.model.fit import fit_steps


def test_a_small_step_never_costs_next_to_nothing():
    """Steps that grow faster than their batches, as on a busy machine: a line through them starts below zero."""
    batches, quotas = [8, 16, 32, 64], [900] * 4
    fitted = fit_steps(batches, quotas, [0.0625, 0.16, 0.36, 0.75])
    assert fitted.b >= 0
    assert fitted.seconds(1, 900) >= 0.9 * fitted.seconds(8, 900) / 8


def test_a_fixed_cost_is_still_found():
    fitted = fit_steps([8, 16, 32, 64], [900] * 4, [0.12, 0.20, 0.36, 0.68])
    assert fitted.b == pytest.approx(4, rel=0.05)
