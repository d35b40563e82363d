"""Fitted loss curves."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("scipy", reason="the extra siren is not installed")

from siren_worlds import CURVE

from ephemeron.errors import JobError
from ephemeron.tuning.siren.loss_curve import Transitions, epochs_until, fit_curve


def test_a_fit_finds_a_curve_again() -> None:
    runs = {w: CURVE.losses([w] * 12) for w in (2, 8, 16)}
    fitted = fit_curve(runs, start=2.3, samples=20_000, batch_size=32, held_out={4: CURVE.losses([4] * 12)})
    assert fitted.error < 0.05
    assert fitted.epochs_error < 0.05
    assert fitted.runs == (2, 8, 16)
    assert fitted.held_out == (4,)
    assert fitted.losses([16, 16, 4, 4, 2]) == pytest.approx(CURVE.losses([16, 16, 4, 4, 2]), rel=0.1)


def test_many_functions_make_fewer_and_quieter_steps() -> None:
    begin = {w: float(CURVE.after_epoch(2.3, w)) for w in (2, 16)}
    end = {w: CURVE.losses([w] * 200)[-1] for w in (2, 16)}
    assert begin[2] < begin[16]
    assert end[16] < end[2]


def test_transitions_are_those_of_the_curve() -> None:
    table = Transitions(CURVE, range(1, 17))
    for loss in (0.1, 0.7, 2.2):
        assert table.after(loss, 8) == pytest.approx(float(CURVE.after_epoch(loss, 8)), rel=1e-3)


def test_epochs_are_interpolated() -> None:
    assert epochs_until([2.0, 1.0, 0.5], 0.75) == pytest.approx(1.5)
    assert epochs_until([2.0, 1.0], 0.75) == math.inf


def test_losses_that_are_none_are_refused() -> None:
    with pytest.raises(JobError, match="positive and finite"):
        fit_curve({2: [1.0, math.nan, 0.5]}, start=2.0, samples=100, batch_size=10)
