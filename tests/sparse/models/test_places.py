"""Places of features in a batch: the same by either way of finding them, and found once for a step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import JobError
from ephemeron.sparse.models import Batch, FactorisationMachine, LatentDirichletAllocation, LogisticRegression, base


def batch_of(indices, samples=3):
    indptr = np.linspace(0, len(indices), samples + 1).astype(np.int64)
    values = np.arange(1, len(indices) + 1, dtype=np.float32)
    return Batch(indptr, np.array(indices, np.int64), values, np.arange(samples) % 2)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 299), max_size=60), st.sampled_from([300, 100_000]))
def test_marking_and_sorting_find_the_same(indices, features):
    batch = batch_of(indices)
    found, matrix = base.local(batch, features)
    assert found.tolist() == sorted(set(indices))
    assert matrix.shape == (3, len(found))
    assert found[matrix.indices].tolist() == indices
    assert matrix.data.tolist() == batch.values.tolist()


@pytest.mark.parametrize("features", [10, 100_000])
@pytest.mark.parametrize("wrong", [-1, 100_000])
def test_a_feature_out_of_range_is_named(features, wrong):
    with pytest.raises(JobError, match=rf"sample 2 of a batch has feature {wrong}, and the model has features 0 to {features - 1}"):
        base.local(batch_of([1, 2, 3, 4, 5, wrong]), features)


@pytest.mark.parametrize(
    "model",
    [LogisticRegression(features=300), FactorisationMachine(features=300), LatentDirichletAllocation(features=300, tokens=9)],
    ids=lambda model: type(model).__name__,
)
def test_a_step_uses_the_places_that_were_found_for_its_rows(model, monkeypatch):
    batch = batch_of([5, 1, 5, 299, 0, 7])
    rows = model.rows(batch)
    values = {name: np.full((len(at), model.tables[name].width), 0.5, np.float32) for name, at in rows.items()}
    plain = model.step(batch, dict(rows), values)
    monkeypatch.setattr(base, "local", None)  # looked for again, this would fail
    found = model.step(batch, rows, values)
    assert found.loss == plain.loss
    assert all(np.array_equal(found.gradients[name], plain.gradients[name]) for name in rows)
