"""The program in `examples/pca/` gives what scikit-learn gives, and removes its tiles."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from ephemeron import FunctionExecutor
from ephemeron.data.tables import dense_batch

PROGRAM = Path(__file__).parents[2] / "examples" / "pca" / "pca.py"


@pytest.mark.slow
def test_ridge_regression_and_principal_components(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    decomposition = pytest.importorskip("sklearn.decomposition")
    linear_model = pytest.importorskip("sklearn.linear_model")
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    spec = importlib.util.spec_from_file_location("example_pca", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example_pca", program)
    spec.loader.exec_module(program)
    program.generate(tmp_path / "table.csv", 5000)
    with FunctionExecutor("local", progress=False, max_workers=2) as pool:
        dataset = program.prepared(tmp_path / "table.csv", tmp_path, pool)
        found = program.fit(dataset, (tmp_path / "tiles").as_uri(), pool, alpha=25.0, tile=900)
    assert len(dataset.partitions) > 1
    parts = [dense_batch(dataset.read(n)) for n in range(len(dataset.partitions))]
    x, y = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    ridge = linear_model.Ridge(alpha=25.0).fit(x, y)
    np.testing.assert_allclose(found.coefficients, ridge.coef_, rtol=1e-8)
    assert found.intercept == pytest.approx(ridge.intercept_, rel=1e-8)
    pca = decomposition.PCA().fit(x)
    np.testing.assert_allclose(found.variances, pca.explained_variance_, rtol=1e-8)
    cosines = np.abs(np.sum(found.components[:5] * pca.components_[:5], axis=1))
    np.testing.assert_allclose(cosines, 1, rtol=1e-8)
    assert pca.explained_variance_ratio_[:5].sum() > 0.95
    assert not [path for path in (tmp_path / "tiles").rglob("*") if path.is_file()]
