"""Fits recover what they were made from, and say how sure they are."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import MissingExtra
from ephemeron.training.planner.model.fit import FORMS, TimingSample, fit_form, fit_memory, fit_rate, fit_steps, fit_transfers, rate_error
from ephemeron.training.planner.model.rates import Affine, Knee, Power, Saturating

GRID = [(b, m) for b in (8, 32, 128, 256) for m in (512, 1024, 1769)]


def cells(a: float, b: float, m: float, *, noise: float = 0.0, seed: int = 0) -> tuple[np.ndarray, ...]:
    batch, memory = (np.array(v, dtype=float) for v in zip(*GRID, strict=True))
    factor = np.exp(noise * np.random.default_rng(seed).standard_normal(len(batch)))
    return batch, memory, a * (batch + b) / (memory + m) * factor


@settings(max_examples=50, deadline=None)
@given(a=st.floats(1e-3, 1e3), b=st.floats(0, 200), m=st.floats(-200, 200))
def test_exact_measurements_give_back_their_coefficients(a, b, m):
    fit = fit_steps(*cells(a, b, m))
    batch, memory, seconds = cells(a, b, m)
    assert fit.seconds(batch, memory) == pytest.approx(seconds, rel=1e-4)
    assert (fit.a, fit.b, fit.m) == pytest.approx((a, b, m), rel=1e-3, abs=0.1)


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say():
    held = 0
    for seed in range(60):
        fit = fit_steps(*cells(37.19, 12.48, -111.46, noise=0.03, seed=seed))
        true = 37.19 * (64 + 12.48) / (800 - 111.46)
        held += abs(math.log(float(fit.seconds(64, 800)) / true)) <= math.log1p(float(fit.half_width(64, 800)))
    assert held >= 51  # of 60, for a level of 95 %


def test_more_noise_makes_wider_intervals_and_larger_errors():
    quiet, loud = (fit_steps(*cells(2.0, 10.0, 0.0, noise=n)) for n in (0.01, 0.1))
    assert quiet.half_width(64, 800) < loud.half_width(64, 800)
    assert np.mean(quiet.left_out) < np.mean(loud.left_out)
    assert all(quiet.plus_minus[k] < loud.plus_minus[k] for k in "abm")


def test_points_that_happen_to_fit_prove_no_more_than_their_own_scatter():
    batch, memory, seconds = cells(2.0, 10.0, 0.0)
    sure = fit_steps(batch, memory, seconds)
    told = fit_steps(batch, memory, seconds, spread=[0.05] * len(batch))
    assert sure.half_width(64, 800) < 1e-4 < told.half_width(64, 800)


def test_as_many_coefficients_as_measurements_leave_everything_open():
    fit = fit_steps([8, 256, 8], [512, 512, 1769], [0.02, 0.2, 0.006])
    assert math.isinf(float(fit.half_width(64, 800)))
    assert fit.left_out == ()


def test_one_quota_says_nothing_of_m_and_one_batch_nothing_of_b():
    one_quota = fit_steps([8, 16, 64, 128], [1769] * 4, [0.01, 0.018, 0.066, 0.13])
    assert one_quota.fixed == ("m",)
    assert one_quota.m == 0
    one_batch = fit_steps([16] * 4, [512, 800, 1200, 1769], [0.04, 0.025, 0.017, 0.0113])
    assert one_batch.fixed == ("b",)
    both = fit_steps([16, 16], [512, 512], [0.04, 0.041])
    assert both.fixed == ("b", "m")
    assert float(both.seconds(16, 512)) == pytest.approx(0.0405, rel=1e-3)


def test_steps_that_do_not_grow_with_the_batch_are_no_trouble():
    batch, memory, _ = cells(1.0, 0.0, 0.0)
    fit = fit_steps(batch, memory, 3.0 / memory)
    assert fit.seconds(batch, memory) == pytest.approx(3.0 / memory, rel=0.01)
    shrinking = fit_steps(batch, memory, (3.0 - batch / 200) / memory)
    assert np.isfinite([shrinking.a, shrinking.b, shrinking.m]).all()


def test_a_disturbed_probe_does_not_carry_the_fit_away():
    batch, memory, seconds = cells(2.0, 10.0, 0.0, noise=0.01)
    seconds[5] *= 3
    assert float(fit_steps(batch, memory, seconds).seconds(64, 800)) == pytest.approx(2.0 * 74 / 800, rel=0.1)


@pytest.mark.parametrize(("batch", "memory", "seconds"), [([], [], []), ([8], [512], [0.0]), ([8, 16], [512], [0.1]), ([8], [-1], [0.1])])
def test_nonsense_is_refused(batch, memory, seconds):
    with pytest.raises(ValueError, match="positive"):
        fit_steps(batch, memory, seconds)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(100, 5000)), min_size=1, max_size=12))
def test_no_measured_peak_lies_above_the_memory_line(points):
    batch, peak = zip(*points, strict=True)
    fit = fit_memory(batch, peak)
    assert fit.slope_mb >= 0
    assert all(fit.slope_mb * b + fit.base_mb >= p - 1e-6 * p for b, p in points)


def test_memory_on_a_line_is_not_raised():
    fit = fit_memory([8, 64, 256], [350 + 0.5 * b for b in (8, 64, 256)])
    assert (fit.slope_mb, fit.base_mb) == pytest.approx((0.5, 350))
    assert fit.raised_mb == pytest.approx(0, abs=1e-9)


SIZES = np.array([0.1, 0.5, 1, 3, 5, 9, 13, 17, 22, 30, 40, 50])
TRUE = [
    Saturating(p_mb_s=80.0, t_per_mb=0.2),
    Affine(latency_s=0.05, mb_s=70.0),
    Power(latency_s=0.02, s_per_mb=0.007, exponent=1.3),
    Knee(latency_s=0.05, s_per_mb=0.06, knee_mb=17.0, s_per_mb_beyond=0.0),
]


@pytest.mark.parametrize("true", TRUE, ids=lambda r: type(r).__name__)
def test_each_form_recovers_itself_and_is_chosen_for_its_own(true):
    seconds = true.seconds(SIZES)
    same = fit_form(type(true), SIZES, seconds)
    assert rate_error(same, SIZES, seconds).max() < 0.03
    chosen = fit_rate(SIZES, seconds)
    assert chosen.errors[type(true).__name__] <= chosen.errors["Affine"] + 1e-9
    assert rate_error(chosen.rate, SIZES, seconds).mean() < 0.03


def test_the_simplest_of_equals_is_chosen():
    assert isinstance(fit_rate(SIZES, 0.05 + SIZES / 70).rate, Affine)


def test_few_sizes_leave_latency_and_bandwidth():
    assert isinstance(fit_rate([0.1, 1.0], [0.06, 0.07]).rate, Affine)


def test_all_coefficients_may_be_read_back():
    """What is fitted is accepted by the profile's parser: nothing negative, nothing zero that must not be."""
    rng = np.random.default_rng(1)
    for form in FORMS:
        rate = fit_form(form, SIZES, np.exp(rng.standard_normal(len(SIZES))))
        for name in ("latency_s", "p_mb_s", "t_per_mb", "mb_s", "s_per_mb", "exponent", "knee_mb", "s_per_mb_beyond"):
            value = getattr(rate, name, 1.0)
            assert value > 0 or (name in ("latency_s", "s_per_mb_beyond") and value == 0)


def test_one_form_is_chosen_per_direction_over_all_quotas():
    rng = np.random.default_rng(0)
    timings = []
    for quota in (512.0, 1024.0, 2048.0):
        for s in SIZES:
            up, down = TRUE[1].seconds(s), TRUE[2].seconds(s)
            timings += [
                TimingSample("up", quota, s, float(up) * (1 + 0.05 * rng.standard_normal())),
                TimingSample("down", quota, s, float(down) * (1 + 0.02 * rng.standard_normal())),
            ]
    fit = fit_transfers(timings)
    assert [t.memory_mb for t in fit.transfer] == [512, 1024, 2048]
    assert len({type(t.up) for t in fit.transfer}) == len({type(t.down) for t in fit.transfer}) == 1
    assert isinstance(fit.transfer[0].down, Power)
    assert fit.error_up < 0.1
    assert fit.error_down < 0.05


def test_a_quota_without_downloads_is_refused():
    with pytest.raises(ValueError, match="512 MB"):
        fit_transfers([TimingSample("up", 512.0, 1.0, 0.1)])


def test_without_scipy_the_command_that_installs_it_is_named(monkeypatch):
    def refuse(name, *args, **kwargs):
        if name.startswith("scipy"):
            raise ModuleNotFoundError(name=name)
        return original(name, *args, **kwargs)

    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(MissingExtra, match=r"pip install 'ephemeron\[profile\]'"):
        fit_steps([8, 16], [512, 1024], [0.1, 0.2])
