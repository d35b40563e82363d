"""Statistics of columns: exact, whatever the partitioning."""

from __future__ import annotations

import functools
import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.preparation import MinMaxScaler, statistics
from ephemeron.preparation.statistics import Histogram, Moments, Occupancy

FINITE = st.floats(allow_nan=False, allow_infinity=False)
CUTS = st.lists(st.integers(0, 60), max_size=6)


def parts(values, cuts):
    ends = [0, *sorted(min(c, len(values)) for c in cuts), len(values)]
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def merged(kind, values, cuts):
    made = [kind.of(np.array(part, np.float64)) for part in parts(values, cuts)]
    made = [kind.read(json.loads(json.dumps(one.plain()))) for one in made]  # as they travel
    return functools.reduce(kind.merge, reversed(made))


@given(st.lists(FINITE, max_size=60), CUTS)
def test_moments_are_exact_whatever_the_partitioning(values, cuts):
    got, exact = merged(Moments, values, cuts), [Fraction(v) for v in values]
    assert got == Moments.of(np.array(values))
    assert got.count == len(values)
    if not values:
        assert math.isnan(got.mean)
        return
    mean = sum(exact) / len(exact)
    assert got.mean == float(mean)
    variance = sum((v - mean) ** 2 for v in exact) / len(exact)
    assert got.variance == (math.inf if variance > Fraction(np.finfo(float).max) else float(variance))
    assert (got.minimum, got.maximum) == (min(values), max(values))


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 1e-300, 1e150, 1e9]), st.sampled_from([0.0, 1.0, 1e6]), st.integers(1, 9))
def test_moments_equal_numpy_on_many_values(seed, scale, offset, pieces):
    values = scale * (np.random.default_rng(seed).normal(size=3000) + offset)
    got = functools.reduce(Moments.merge, map(Moments.of, np.array_split(values, pieces)))
    np.testing.assert_allclose(got.mean, np.mean(values), rtol=0, atol=1e-12 * np.abs(values).max())
    if 1e-100 < scale < 1e100:
        np.testing.assert_allclose(got.variance, np.var(values), rtol=1e-12)


def test_a_million_values_in_several_batches_of_the_sum():
    values = np.random.default_rng(1).lognormal(3, 4, size=(1 << 20) + 5)
    got = Moments.of(values)
    assert got.mean == math.fsum(values) / len(values)


def test_absent_and_infinite_values_are_counted():
    got = Moments.of(np.array([1.0, np.nan, np.inf, -np.inf, 3.0, np.nan]))
    assert (got.count, got.missing, got.infinite, got.mean, got.variance) == (2, 2, 2, 2.0, 1.0)
    assert Moments.of(np.array([np.nan])).missing == 1


@given(st.lists(FINITE, max_size=60), CUTS, st.integers(2, 40))
def test_histograms_do_not_depend_on_the_partitioning(values, cuts, groups):
    before, statistics.GROUPS = statistics.GROUPS, groups
    try:
        got, whole = merged(Histogram, values, cuts), Histogram.of(np.array(values, np.float64))
        assert got.dropped == whole.dropped
        assert np.array_equal(got.keys, whole.keys)
        assert np.array_equal(got.counts, whole.counts)
        assert got.count == len(values)
        assert len(got.keys) <= groups
        if len(values) > 1:
            found = got.quantiles([0, 0.25, 0.5, 1])
            ordered = np.sort(values)
            assert np.all(found[:-1] <= found[1:]) or not np.all(np.isfinite(found))
            for at, value in zip((0, 0.25, 0.5, 1), found, strict=True):
                slack = got.largest_share * len(values) + 1
                low = ordered[max(0, math.floor(at * (len(values) - 1) - slack))]
                high = ordered[min(len(values) - 1, math.ceil(at * (len(values) - 1) + slack))]
                assert low <= value <= high or not math.isfinite(value)
    finally:
        statistics.GROUPS = before


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), CUTS)
def test_quantiles_of_few_distinct_values_equal_numpy(values, cuts):
    shares = np.linspace(0, 1, 11)
    np.testing.assert_allclose(merged(Histogram, values, cuts).quantiles(shares), np.quantile(values, shares), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("kind", ["uniform", "normal", "lognormal"])
def test_the_error_in_rank_is_within_what_is_stated(kind):
    values = getattr(np.random.default_rng(0), kind)(size=200_000)
    got = functools.reduce(Histogram.merge, map(Histogram.of, np.array_split(values, 7)))
    shares = np.linspace(0, 1, 101)
    ranks = np.searchsorted(np.sort(values), got.quantiles(shares)) / len(values)
    assert 0 < got.largest_share < 0.002
    assert np.max(np.abs(ranks - shares)) <= got.largest_share + 2 / len(values)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50), CUTS)
def test_keys_and_buckets_are_counted_whatever_the_partitioning(keys, cuts):
    made = [Occupancy.of(np.array(part, np.uint64), 16) for part in parts(keys, cuts)]
    made = [Occupancy.read(json.loads(json.dumps(one.plain()))) for one in made]
    got = functools.reduce(Occupancy.merge, made)
    assert got.distinct == len(set(keys))
    assert got.occupied == len({k % 16 for k in keys})


def test_more_keys_than_are_kept_are_estimated(monkeypatch):
    monkeypatch.setattr(statistics, "KEPT", 4096)
    keys = np.random.default_rng(0).integers(0, 2**64, size=100_000, dtype=np.uint64)
    got = functools.reduce(Occupancy.merge, (Occupancy.of(part, 64) for part in np.array_split(keys, 5)))
    assert not got.exact
    assert abs(got.distinct / 100_000 - 1) < 5 / math.sqrt(4096)
    assert got.distinct == Occupancy.of(keys, 64).distinct


def test_quantiles_and_ranges_at_the_ends_of_float64():
    ends = np.array([1.7e308, -1.7e308, 1e308, -1e308])
    assert Histogram.of(ends).quantiles([0, 0.25, 0.5, 1]).tolist() == [-1.7e308, -1.175e308, 0, 1.7e308]
    for values, right in (([1.7e308, -1.7e308, 0.0], [1, 0, 0.5]), ([0.0, 1e-310], [0, 1]), ([5e-324, 1e-323, 1.5e-323], [0, 0.5, 1])):
        np.testing.assert_allclose(MinMaxScaler().fit_transform({"x": values})["x"], right, rtol=1e-12)


def test_the_root_of_a_variance_needs_no_variance_in_float64():
    for values in ([1e200, -1e200], [1e-200, 3e-200], [1.7e308, -1.7e308]):
        half = (max(values) - min(values)) / 2 if max(values) < 1e300 else 1.7e308
        assert Moments.of(np.array(values)).deviation == half
    assert Moments.of(np.array([1e8, 1e8 + 2e-8, 1e8])).mean_rest != 0
    assert math.isnan(Moments().deviation)
