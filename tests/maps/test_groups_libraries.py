"""Groups fitted with LightGBM, XGBoost and statsmodels, in function processes: the snippets of docs/groups.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import ephemeron
from ephemeron.maps import GroupModels

pd = pytest.importorskip("pandas", reason="frames; pip install 'ephemeron[pandas]'")
pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")

PAGE = Path(__file__).parents[2] / "docs" / "groups.md"
LOOKED_AT = """

def looked_at(group: pd.DataFrame):
    import sys

    import threadpoolctl

    model, metrics = fit(group)
    threads = [about["num_threads"] for about in threadpoolctl.threadpool_info()]  # of OpenMP and BLAS
    if hasattr(model, "booster_"):
        threads.append(model.booster_.params["num_threads"])
    return model, {**metrics, "torch": "torch" in sys.modules, "threads": threads}
"""


def snippet(library: str) -> str:
    """The module of the page that fits with a library."""
    [found] = [
        text
        for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if re.search(rf"^import {library}\b", text, re.MULTILINE)
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("library", ["lightgbm", "xgboost", "statsmodels"])
def test_models_come_back_and_have_the_threads_of_a_function(tmp_path, monkeypatch, library):
    pytest.importorskip(library, reason=f"its models; pip install {library}")
    pytest.importorskip("threadpoolctl", reason="threads of libraries; pip install scikit-learn")
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"fits_with_{library}"
    (tmp_path / f"{module}.py").write_text(snippet(library) + LOOKED_AT)
    rng = np.random.default_rng(0)
    data = pd.DataFrame({"store": rng.choice(["Rome", "Oslo"], 400), "day": np.arange(400.0), "price": rng.uniform(1, 2, 400)})
    data["sold"] = data.day / 10 - 5 * data.price + rng.normal(0, 0.1, 400)
    options = {"max_workers": 1, "memory_mb": 1769, "retries": 0, "progress": False}
    result = ephemeron.fit_groups(f"{module}:looked_at", data, by="store", out="models", **options)
    assert (result.computed, [each.error for each in result.failures]) == (2, [])
    models = GroupModels.open("models")
    for row in models.rows():
        assert row["metrics"]["error"] < 3
        assert not row["metrics"]["torch"]
        assert set(row["metrics"]["threads"]) == {1}, "a function of one vCPU has one thread"
    new = data.drop(columns="sold").head(50)
    ephemeron.predict_groups(models, new, out="predicted.parquet", **options)
    predicted = pd.read_parquet("predicted.parquet")
    for store, rows in predicted.groupby("store"):
        np.testing.assert_allclose(models[store].predict(rows[["day", "price"]]), rows.prediction)
        assert np.abs(rows.prediction - data.sold[rows.index]).mean() < 3
