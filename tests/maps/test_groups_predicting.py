"""`predict_groups`: predictions beside the rows in their order; unknown groups, changed models, damage."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import group_models
import numpy as np
import pytest

import ephemeron
from ephemeron.errors import JobError
from ephemeron.functions.base import Limits
from ephemeron.maps import GroupModels, frame_functions
from ephemeron.maps.computing import MapOptions
from ephemeron.maps.groups import joining
from ephemeron.maps.groups import models as group_store
from ephemeron.maps.groups.predicting import open_predict_groups
from ephemeron.runs import folders

pa = pytest.importorskip("pyarrow", reason="tables; pip install 'ephemeron[maps]'")
pd = pytest.importorskip("pandas", reason="pandas to compare with")
from pyarrow import parquet  # noqa: E402

SIMULATED = {"platform": "simulated", "retries": 0}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sales(rows: int = 600, *, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    store = rng.choice(np.array(["a", "b", None, "c/d"], object), rows)
    return pd.DataFrame({"store": store, "sku": rng.integers(0, 5, rows), "t": rng.uniform(size=rows), "y": rng.standard_normal(rows)})


def fitted(function=group_models.line, frame=None, *, by=("store", "sku"), out="models", **options) -> GroupModels:
    ephemeron.fit_groups(function, sales() if frame is None else frame, by=by, out=out, **SIMULATED, **options)
    return GroupModels.open(out)


def predicted(data, *, out="predicted.parquet", models="models", **options):
    result = ephemeron.predict_groups(models, data, out=out, **SIMULATED, **options)
    return result, pd.read_parquet(out) if str(out).endswith("parquet") else pd.read_csv(out, dtype=str, keep_default_na=False)


def expected_of(models: GroupModels, frame: pd.DataFrame) -> list[float]:
    keys = [(None if pd.isna(store) else store, sku) for store, sku in zip(frame.store, frame.sku, strict=True)]
    return [models[key].predict({"t": [t]})[0] if key in models else np.nan for key, t in zip(keys, frame.t, strict=True)]


@pytest.mark.parametrize("rows", [7, joining._ROWS])
def test_predictions_are_beside_the_rows_in_their_order(monkeypatch, rows):
    monkeypatch.setattr(joining, "_ROWS", rows)
    models, new = fitted(), sales(300, seed=1)
    new.drop(columns="y").to_parquet("new.parquet", index=False)
    result, found = predicted("new.parquet")
    assert (result.items, result.failed) == (len(new.groupby(["store", "sku"], dropna=False)), 0)
    pd.testing.assert_frame_equal(found.drop(columns="prediction"), pd.read_parquet("new.parquet"))
    np.testing.assert_allclose(found.prediction, expected_of(models, new), rtol=1e-12)
    again, _ = predicted("new.parquet")
    assert again.computed == 0


def test_superseded_models_are_forgotten_but_while_predictions_read_them(here, monkeypatch):
    monkeypatch.setattr(group_store, "INLINE_BYTES", 10)

    def objects():
        return sorted(path.name for path in (here / "models" / "models").glob("*"))

    old, new = fitted(), sales(100, seed=1)
    first = objects()
    fitted(code_version="v2", frame=sales(seed=3))
    assert set(first) < set(objects())
    job = open_predict_groups(old, new, out="read.parquet", options=MapOptions(), executor=SIMULATED)
    told = []
    fitted(code_version="v2", frame=sales(seed=3), forget_superseded=True, on_note=told.append)
    assert told[-1].startswith(f"{len(old)} superseded rows forgotten")
    assert set(first) < set(objects()), "they are read"
    assert job.run().failed == 0
    result = ephemeron.fit_groups(
        group_models.line, sales(seed=3), by=("store", "sku"), out="models", code_version="v2", forget_superseded=True, **SIMULATED
    )
    assert (result.computed, result.forgotten) == (0, 0)
    assert not set(first) & set(objects())
    models = GroupModels.open("models")
    assert len(objects()) == len(models)
    _, found = predicted(new, out="after.parquet")
    np.testing.assert_allclose(found.prediction, expected_of(models, new), rtol=1e-12)


def test_rows_of_unknown_groups_are_null_and_told():
    frame = sales()
    models = fitted(frame=frame[frame.store != "b"])
    notes = []
    result, found = predicted(frame, on_note=notes.append)
    assert any(
        f'{(frame.store == "b").sum()} rows are of groups without a model, whose predictions are null: ["b",' in note for note in notes
    )
    assert found.prediction.isna().tolist() == (frame.store == "b").tolist()
    np.testing.assert_allclose(found.prediction, expected_of(models, frame))
    assert result.failed == 0
    with pytest.raises(JobError, match="no group of the table has a model"):
        predicted(frame[frame.store == "b"])


def test_only_groups_whose_rows_or_model_have_changed_are_computed():
    frame = sales()
    fitted(frame=frame)
    new = sales(200, seed=2)
    first, before = predicted(new)
    new.loc[5, "t"] = 0.5
    assert predicted(new)[0].computed == 1
    frame.loc[3, "y"] += 1
    fitted(frame=frame)
    result, after = predicted(new)
    assert result.computed == 1
    changed = (new.store.fillna("") == (frame.store.fillna("")[3])) & (new.sku == frame.sku[3])
    assert (before.prediction != after.prediction)[changed].all()
    assert (before.prediction == after.prediction)[~changed].sum() >= (~changed).sum() - 1
    assert first.items == result.items


def test_csv_stays_as_it_is_written(here):
    frame = sales(100)
    frame["sku"] = frame.sku.map("{:03d}".format)
    frame.fillna("").to_csv("sales.csv", index=False)
    fitted(frame="sales.csv")
    text = "store,sku,t,note\n" + "".join(
        f"{s},{k},{t},1e3\n" for s, k, t in frame.fillna("")[["store", "sku", "t"]].itertuples(index=False)
    )
    Path("new.csv").write_text(text)
    _, found = predicted("new.csv", out="out.csv")
    lines = Path("out.csv").read_text().splitlines()
    assert lines[0] == "store,sku,t,note,prediction"
    assert [line.rpartition(",")[0] for line in lines] == text.splitlines()
    assert all(map(float, found.prediction))


def test_whole_numbers_of_csv_are_numbers_where_the_fit_had_numbers(here):
    Path("sales.csv").write_text("g,t,y,code\na,0.5,1,x\na,1,2,1\n")
    Path("new.csv").write_text("g,t,code\na,1,1\na,2,2\n")
    ephemeron.fit_groups(group_models.line, "sales.csv", by="g", out="models", **SIMULATED)

    def types(model, group):
        return {"of": [json.dumps({name: str(dtype) for name, dtype in group.dtypes.items()})] * len(group)}

    _, found = predicted("new.csv", predict=types, out="out.parquet")
    assert json.loads(found["of"][0]) == {"t": "float64", "code": str(pd.Series(["x"]).dtype)}


def test_a_function_of_the_user_gives_columns():
    frame = sales(200)
    ephemeron.fit_groups(group_models.large, frame, by="sku", out="models", **SIMULATED)
    result, found = predicted(frame, predict=group_models.sum_of)
    assert result.failed == 0, "large models are read by functions"
    means = frame.groupby("sku").y.transform("mean")
    np.testing.assert_allclose(found.level, means)
    assert set(found["name"]) == {"x"}
    with pytest.raises(JobError, match=r"holds the results of .*sum_of"):
        predicted(frame, predict=group_models.too_few)


@pytest.mark.parametrize(
    ("value", "columns"),
    [
        (lambda n: np.arange(n, dtype=float), ["prediction"]),
        (lambda n: list(range(n)), ["prediction"]),
        (lambda n: ["x"] * n, ["prediction"]),
        (lambda n: np.zeros((n, 1)), ["prediction"]),
        (lambda n: np.zeros((n, 2)), ["prediction_0", "prediction_1"]),
        (lambda n: pd.Series(range(n), index=range(5, 5 + n)), ["prediction"]),
        (lambda n: pd.DataFrame({"low": range(n), "high": range(n)}), ["low", "high"]),
        (lambda n: pa.table({"p": range(n)}), ["p"]),
        (lambda n: pa.array(range(n)), ["prediction"]),
        (lambda n: {"p": pd.Series(range(n))}, ["p"]),
    ],
)
def test_predictions_of_all_kinds(value, columns):
    frame = sales(30)
    fitted(frame=frame)

    def predict(model, group):
        return value(len(group))

    result, found = predicted(frame, predict=predict)
    assert result.failed == 0, result.failures
    assert list(found.columns[len(frame.columns) :]) == columns


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0], "there are 1 predictions for"),
        (3, "the predictions are a int, which is no column"),
        ({"t": []}, "there are 0 predictions for"),
        ({}, "there are 0 predictions for"),
    ],
)
def test_wrong_predictions_are_rows_of_errors(value, said):
    frame = sales(60)
    fitted(frame=frame, by=["store"])
    result, found = predicted(frame, predict=lambda model, group: value)
    assert result.failed == result.items
    assert said in result.failures[0].error
    assert found.prediction.isna().all()


def test_a_group_that_fails_is_null_and_the_others_are_there():
    frame = sales()
    models = fitted(frame=frame)
    result, found = predicted(frame, predict=group_models.fails_for_some)
    assert result.failed == len(frame[frame.store == "b"].groupby("sku"))
    assert "ValueError: no forecast of b" in result.failures[0].error
    assert found.prediction.isna().tolist() == (frame.store == "b").tolist()
    np.testing.assert_allclose(found.prediction[frame.store != "b"], expected_of(models, frame[frame.store != "b"]))
    assert predicted(frame, predict=group_models.fails_for_some)[0].computed == 0
    assert predicted(frame, predict=group_models.fails_for_some, retry_failed=True)[0].computed == result.failed


def test_kinds_of_predictions_are_joined_or_refused():
    frame = sales(60)
    fitted(frame=frame, by=["sku"])

    def some_whole(model, group, key):
        return list(range(len(group))) if key["sku"] else [0.5] * len(group)

    _, found = predicted(frame, predict=some_whole)
    assert found.prediction.dtype == "float64"

    def some_text(model, group, key):
        return list(range(len(group))) if key["sku"] else ["x"] * len(group)

    result = ephemeron.predict_groups("models", frame, predict=some_text, out="text.parquet", **SIMULATED)
    assert "have no types in common" in result.stopped

    def one_too_large(model, group, key):
        return [2**53 + 1] * len(group) if key["sku"] else [0.5] * len(group)

    result = ephemeron.predict_groups("models", frame, predict=one_too_large, out="large.parquet", **SIMULATED)
    assert (
        "predictions 'prediction' of int64 cannot be double, as those of other groups are: Integer value 9007199254740993" in result.stopped
    )
    assert "the predictions are recorded in" in result.stopped
    assert not Path("text.parquet").exists()


def test_edited_classes_of_models_predict_again(here):
    module = "class Level:\n    def predict(self, group):\n        return [LEVEL] * len(group)\n\ndef fit(group):\n    return Level()\n"
    (here / "levels_of_groups.py").write_text(f"LEVEL = 1\n{module}")
    frame = sales(30)
    ephemeron.fit_groups("levels_of_groups:fit", frame, by="sku", out="models", **SIMULATED)
    assert set(predicted(frame)[1].prediction) == {1}
    assert predicted(frame)[0].computed == 0
    (here / "levels_of_groups.py").write_text(f"LEVEL = 2\n{module}")
    assert predicted(frame)[0].computed == 5


def test_an_estimator_is_given_the_columns_that_it_was_fitted_to():
    linear_model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn")
    frame = sales().assign(u=lambda f: f.t**2)
    ephemeron.fit_groups(
        lambda group: linear_model.LinearRegression().fit(group[["u", "t"]], group["y"]), frame, by="sku", out="models", **SIMULATED
    )
    _, found = predicted(frame)
    models = GroupModels.open("models")
    for sku, rows in frame.groupby("sku"):
        np.testing.assert_allclose(found.prediction[rows.index], models[sku].predict(rows[["u", "t"]]))


def test_a_model_that_is_a_function_is_called():
    frame = sales(50)
    fitted(group_models.a_function, frame, by=["sku"])
    _, found = predicted(frame)
    np.testing.assert_allclose(found.prediction, frame.groupby("sku").y.transform("mean"))


def test_a_damaged_model_is_named_and_never_unpickled(here):
    frame = sales(60)
    ephemeron.fit_groups(group_models.large, frame, by="sku", out="models", **SIMULATED)
    for path in (here / "models" / "models").iterdir():
        path.write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")
    result, _ = predicted(frame, predict=group_models.sum_of)
    assert result.failed == result.items == 5
    assert all(f"the model of group {failure.key} is damaged" in failure.error for failure in result.failures)
    assert not (here / "executed").exists()


def test_wrong_requests_are_refused_before_anything_begins(here):
    frame = sales(100)
    fitted(frame=frame)
    runs = len(folders.all_runs())
    frame.to_parquet("new.parquet")
    for said, data, options in (
        ("there are no models in nowhere", frame, {"models": "nowhere"}),
        ("has no column 'sku'; did you mean skus?", frame.rename(columns={"sku": "skus"}), {}),
        ("by-column sku is of text, and groups of the models are of whole numbers", frame.astype({"sku": str}), {}),
        ("has a column 'prediction' already", frame.assign(prediction=1), {}),
        ("is no table of this machine", frame, {"out": "s3://bucket/x.parquet"}),
        ("is no table of this machine", frame, {"out": "x.jsonl"}),
        ("there is no folder", frame, {"out": "nowhere/x.parquet"}),
        ("is the file that is read", "new.parquet", {"out": "new.parquet"}),
        ("takes 1 arguments; it is called with model, group", frame, {"predict": group_models.line}),
        ("there is no file absent.parquet", "absent.parquet", {}),
    ):
        with pytest.raises(JobError, match=said.replace("?", r"\?")):
            predicted(data, **options)
    assert len(folders.all_runs()) == runs
    assert not (here / "nowhere").exists()
    (here / "models" / "fit.json").write_text("{")
    with pytest.raises(JobError, match=r"fit.json is damaged; fit the groups again"):
        predicted(frame)


def test_a_table_of_several_files_keeps_its_order(here):
    frame = sales(90)
    models = fitted(frame=frame)
    (here / "new").mkdir()
    for n in range(3):
        frame.iloc[30 * n : 30 * n + 30].to_parquet(f"new/{n}.parquet", index=False)
    _, found = predicted("new")
    np.testing.assert_allclose(found.prediction, expected_of(models, frame))
    assert parquet.read_schema("predicted.parquet").names == [*frame.columns, "prediction"]


def test_the_table_of_results_is_where_it_is_wanted(here):
    frame = sales(50)
    fitted(frame=frame)
    predicted(frame, results="kept")
    assert (here / "kept" / "rows").is_dir()
    assert not (here / "predicted.parquet.results").exists()
    assert predicted(frame, results="kept", out="other.parquet")[0].computed == 0


def test_functions_of_a_cloud_have_to_reach_the_groups(monkeypatch):
    fitted(group_models.large, sales(50), by=["sku"])
    monkeypatch.setattr(frame_functions, "admitted", lambda asked: (SimpleNamespace(memory_mb=1024), {}, Limits(concurrency=10)))
    away = {"platform": "aws", "channel": "s3://bucket/prefix"}
    with pytest.raises(
        JobError, match=r"is on this machine, and functions on aws read the groups; name a bucket, .* as --out of fit-groups"
    ):
        ephemeron.fit_groups(group_models.line, sales(50), by="sku", out="models", **away)
    with pytest.raises(JobError, match="as --results"):
        ephemeron.predict_groups("models", sales(50), out="p.parquet", predict=group_models.sum_of, **away)
