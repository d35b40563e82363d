"""Minus zero survives sums and means exactly where every term is absent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ephemeron.training.tensors import ABSENT, absent_parts

BOUNDS = [(0, 1), (1, 4), (4, 4), (4, 6)]
VALUES = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30).map(lambda x: x + 0.0)


@given(
    st.lists(
        st.tuples(hnp.arrays(np.float32, 6, elements=VALUES), st.sets(st.sampled_from([0, 1, 3])), st.integers(1, 9)),
        min_size=1,
        max_size=5,
    )
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_part_of_the_mean_is_absent_only_if_all_ranks_had_none(dtype, ranks):
    total, weight = None, 0
    for vector, without, samples in ranks:
        vector = vector.astype(dtype) * dtype(samples)
        for i in without:
            vector[slice(*BOUNDS[i])] = ABSENT
        total, weight = vector if total is None else total + vector, weight + samples
    expected = set.intersection(*(without for _, without, _ in ranks))
    assert absent_parts(total / dtype(weight), BOUNDS) == expected
