"""Closed-form counts and enumeration of integer points are those of a search of the box around them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import EphemeronError
from ephemeron.linalg.analysis.counting import number_of_points, points, rows_of
from ephemeron.linalg.analysis.propagation import Infeasible, Steps
from ephemeron.linalg.analysis.system import Linear

BOX = 4


def box(dimension):
    """0 ≤ x ≤ BOX for every variable."""
    return [f for v in range(dimension) for f in (Linear({v: 1}), Linear({v: -1}, BOX))]


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(*[st.integers(-2, 2)] * 3, st.integers(-5, 5)), max_size=4))
def test_counts_and_points_of_random_polytopes(dimension, cuts):
    forms = [Linear({v: a for v, a in enumerate(cut[:dimension]) if a}, cut[3]) for cut in cuts]
    expected = [
        x
        for x in product(range(BOX + 1), repeat=dimension)
        if all(f.constant + sum(a * x[v] for v, a in f.coefficients.items()) >= 0 for f in forms)
    ]
    try:
        rows = rows_of([*box(dimension), *forms], list(range(dimension)))
    except Infeasible:
        assert expected == []
        return
    found = list(points(dict(rows), dimension, Steps()))
    assert sorted(found) == expected
    assert number_of_points(rows, dimension, Steps()) == len(expected)


@pytest.mark.parametrize("n", [10, 10**9])
def test_a_tetrahedron_of_any_size_takes_the_same_steps(n):
    forms = [Linear({0: 1}), Linear({1: 1, 0: -1}), Linear({2: 1, 1: -1}), Linear({2: -1}, n - 1)]  # 0 ≤ x ≤ y ≤ z < n
    steps = Steps()
    assert number_of_points(rows_of(forms, [0, 1, 2]), 3, steps) == n * (n + 1) * (n + 2) // 6
    assert steps.taken < 200


def test_points_without_bounds_are_refused():
    with pytest.raises(EphemeronError, match="no bounds"):
        next(points(rows_of([Linear({0: 1})], [0]), 1, Steps()))
