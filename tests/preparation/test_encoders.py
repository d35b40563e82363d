"""Absent values and categories: equal to scikit-learn's, whatever the partitioning, and refused by name where they cannot be right."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.data.tables import Column, TableDataset, TableWriter
from ephemeron.errors import JobError, NotRepresentable
from ephemeron.preparation import (
    DropMissing,
    FeatureHasher,
    HashSplit,
    InProcess,
    OneHotEncoder,
    OrdinalEncoder,
    Pipeline,
    SimpleImputer,
    StandardScaler,
)
from ephemeron.preparation.columns import from_mapping, to_table
from ephemeron.preparation.pipeline import make_step

pa = pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")

COLUMNS = (
    Column(name="churned", kind="label", dtype="float32"),
    Column(name="age", kind="numeric", dtype="float64"),
    Column(name="income", kind="numeric", dtype="float64"),
    Column(name="city", kind="categorical", dtype="string"),
    Column(name="plan", kind="categorical", dtype="string"),
)
HERE = InProcess()


def rows(count, seed=0):
    rng = np.random.default_rng(seed)

    def gaps(values, share):
        return [None if absent else value for value, absent in zip(values, rng.random(count) < share, strict=True)]

    return {
        "churned": rng.integers(0, 2, count).astype(float).tolist(),
        "age": gaps(rng.integers(18, 80, count).astype(float).tolist(), 0.2),
        "income": gaps(rng.lognormal(8, 1, count).tolist(), 0.1),
        "city": gaps([f"c{rng.zipf(1.6) % 40:02d}" for _ in range(count)], 0.1),
        "plan": gaps(rng.choice(["gold", "größe ü", "basic"], count).tolist(), 0.1),
    }


def stored(folder, data, ends):
    table = to_table(from_mapping(data, COLUMNS), COLUMNS)
    writer = TableWriter(str(folder), COLUMNS)
    edges = [0, *ends, table.num_rows]
    parts = [writer.write(n, table.slice(a, b - a)) for n, (a, b) in enumerate(itertools.pairwise(edges))]
    return writer.finish("people", parts)


def steps():
    return [
        SimpleImputer(["age"], strategy="median", indicator=True),
        DropMissing(["income"]),
        SimpleImputer(["city"], strategy="most_frequent"),
        StandardScaler(["income", "age_missing"]),
        OneHotEncoder(["plan"]),
        OrdinalEncoder(["city"], min_frequency=3),
    ]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 300), max_size=5).map(sorted))
def test_a_pipeline_is_the_same_whatever_the_partitioning(tmp_path_factory, ends):
    folder = tmp_path_factory.mktemp("d")
    data = rows(300)
    dataset = stored(folder / "raw", data, ends)
    made = Pipeline(steps()).fit(dataset, pool=HERE, state=str(folder / "fit"))
    again = Pipeline(steps()).fit(dataset, pool=HERE, state=str(folder / "fit"))  # from the statistics that are stored
    once = Pipeline(steps()).fit(data, label="churned")
    assert [s.fitted() for s in made.steps] == [s.fitted() for s in once.steps] == [s.fitted() for s in again.steps]
    out = made.transform(dataset, out=str(folder / "out"), pool=HERE)
    assert out.schema == made.schema_out_
    assert out.manifest.dropped == sum(value is None for value in data["income"]) == made.steps[1].n_dropped_
    whole = pa.concat_tables(out.tables())
    here = once.transform(data)
    assert np.array_equal(np.stack(whole.column("plan").to_pylist()), here["plan"])
    for name in ("age", "income", "age_missing", "city"):
        assert np.array_equal(whole.column(name).to_numpy(), here[name]), name
    loaded = Pipeline.load(TableDataset.open(str(folder / "out")))
    assert loaded.version_ == made.version_
    assert loaded.schema_out_ == out.schema
    assert loaded.sizes_ == {"plan": 3, "city": len(made.steps[5].categories_[0]) + 1}


def test_values_equal_those_of_scikit_learn():
    impute = pytest.importorskip("sklearn.impute", reason="the transforms to compare with")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    data = rows(500)
    numbers = np.array([data["age"], data["income"]], float).T
    texts = np.array([data["city"], data["plan"]], object).T
    for strategy in ("mean", "median", "most_frequent"):
        theirs = impute.SimpleImputer(strategy=strategy, add_indicator=True).fit_transform(numbers)
        ours = SimpleImputer(["age", "income"], strategy=strategy, indicator=True).fit(data)
        got = ours.transform(data)
        np.testing.assert_allclose(np.stack([got[n] for n in ("age", "income", "age_missing", "income_missing")], 1), theirs, rtol=1e-12)
    theirs = impute.SimpleImputer(strategy="most_frequent", missing_values=None).fit_transform(texts)
    got = SimpleImputer(["city", "plan"], strategy="most_frequent").fit_transform(data)
    assert [got["city"], got["plan"]] == theirs.T.tolist()
    filled = SimpleImputer(strategy="constant", fill_value="none").fit_transform(data)
    texts = np.array([filled["city"], filled["plan"]], object).T
    theirs = preprocessing.OneHotEncoder(sparse_output=False).fit(texts)
    one_hot = OneHotEncoder().fit(filled)
    got = one_hot.transform(filled)
    assert np.array_equal(np.hstack([got["city"], got["plan"]]), theirs.transform(texts))
    assert one_hot.categories_ == [one.tolist() for one in theirs.categories_]
    codes = OrdinalEncoder().fit_transform(filled)
    theirs = preprocessing.OrdinalEncoder().fit_transform(texts)
    assert np.array_equal(np.stack([codes["city"], codes["plan"]], 1), theirs + 1)


def test_unknown_and_absent_categories_are_zeros_or_refused():
    train = {"plan": ["b", "a", "b", None]}
    test = {"plan": ["a", "new", None, "b"]}
    assert OneHotEncoder().fit(train).transform(test)["plan"].tolist() == [[1, 0], [0, 0], [0, 0], [0, 1]]
    assert OrdinalEncoder().fit(train).transform(test)["plan"].tolist() == [1, 0, 0, 2]
    assert OrdinalEncoder(min_frequency=2).fit(train).transform(test)["plan"].tolist() == [0, 0, 0, 1]
    for step in (OneHotEncoder(handle_unknown="error"), OrdinalEncoder(handle_unknown="error")):
        pipeline = Pipeline([step]).fit(train)
        with pytest.raises(NotRepresentable, match="column plan, row 1: 'new' is no category of the training rows"):
            pipeline.transform(test)
        applied = pipeline.apply_valid(from_mapping(test, pipeline.schema_in_))
        assert applied.numbers.tolist() == [0, 2, 3]
        assert list(applied.refused) == [1]


def test_a_row_that_is_dropped_is_told_from_one_that_is_refused(tmp_path):
    data = rows(200)
    dataset = stored(tmp_path / "raw", data, [90])
    split = HashSplit(0.5, key=["age", "income"], seed=1)
    rule = [DropMissing(["age"]), OneHotEncoder(["city"], handle_unknown="error", limit=40), FeatureHasher(["plan"], n_features=8)]
    pipeline = Pipeline(rule).fit(dataset, split=split, pool=HERE)
    options = {"split": split, "side": "test", "pool": HERE}
    with pytest.raises(JobError, match="is no category of the training rows"):
        pipeline.transform(dataset, out=str(tmp_path / "fail"), **options)
    out = pipeline.transform(dataset, out=str(tmp_path / "out"), on_error="quarantine", **options)
    lines = [json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()]
    known = set(pipeline.steps[1].categories_[0])
    assert {line["column"] for line in lines} == {"city"}
    assert all(data["city"][line["row"] - 1] not in known for line in lines)
    assert all(data["age"][line["row"] - 1] is not None for line in lines)
    assert out.manifest.rejected == len(lines)
    from ephemeron.preparation.columns import from_table

    tested = split.is_test(from_table(pa.concat_tables(dataset.tables()), dataset.schema), ["age", "income"])
    assert out.manifest.dropped == sum(t and value is None for t, value in zip(tested, data["age"], strict=True))
    assert len(out) + out.manifest.dropped + out.manifest.rejected == tested.sum()


def test_data_frames_arrays_and_single_rows():
    pandas = pytest.importorskip("pandas", reason="the data frame")
    data = rows(40)
    frame = pandas.DataFrame(data, index=range(100, 140))
    got = Pipeline(steps()).fit(frame, label="churned").transform(frame)
    assert isinstance(got, pandas.DataFrame)
    assert got.index.tolist() == frame.index[frame["income"].notna()].tolist()
    assert got["city"].dtype == np.int64
    assert got["plan"].iloc[0].shape == (3,)
    assert list(got) == ["churned", "age", "income", "city", "plan", "age_missing"]
    numeric = Pipeline([SimpleImputer(indicator=True), StandardScaler()]).fit(frame[["age", "income"]])
    assert isinstance(numeric.transform(frame[["age", "income"]]), pandas.DataFrame)
    array = frame[["age", "income"]].to_numpy()
    assert numeric.transform(array).shape == (40, 4)
    assert not np.isnan(numeric.transform(array)).any()
    one = Pipeline(steps()).fit(frame, label="churned").transform({"age": None, "income": 5.0, "city": "c01", "plan": "gold"})
    assert one["age_missing"].shape == (1,)
    assert one["plan"].tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("step", "options", "said"),
    [
        ("impute", {"strategy": "mode"}, "impute: strategy = 'mode' is not known; use one of mean, median, most_frequent, constant"),
        ("impute", {"strategy": "constant"}, "impute: fill_value is missing"),
        ("impute", {"fill_value": 1}, "impute: fill_value = 1 is for strategy 'constant'"),
        ("impute", {"strategy": "constant", "fill_value": float("inf")}, "impute: fill_value = inf is neither a finite number nor a text"),
        ("impute", {"columns": ["city"]}, "impute: column city is categorical; name numeric columns"),
        ("impute", {"columns": ["empty"]}, "impute: column empty has no value in the training rows"),
        ("impute", {"add_indicator": True}, "impute has no option add_indicator; did you mean indicator?"),
        ("one_hot", {"columns": ["age"]}, "one_hot: column age is numeric; name categorical columns"),
        ("one_hot", {"columns": ["city"], "limit": 3}, "one_hot: column city has more than 3 categories; raise limit, hash the column"),
        ("one_hot", {"limit": 0}, "one_hot: limit = 0 should be from 1 to 10000"),
        ("ordinal", {"handle_unknown": "zeros"}, "ordinal: handle_unknown = 'zeros' is not known; use one of ignore, error"),
        ("ordinal", {"min_frequency": 1000}, "ordinal: column city has no category with 1000 rows in the training rows"),
        ("drop_missing", {"columns": ["empty"]}, "drop_missing: each of the 60 training rows lacks a value of empty"),
        ("drop_missing", {"columns": ["cty"]}, "drop_missing: unknown column cty; did you mean city?"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(step, options, said):
    data = {**rows(60), "empty": [float("nan")] * 60}
    with pytest.raises(JobError) as found:
        Pipeline([make_step(step, options, where="steps[0]")]).fit(data, label="churned")
    assert said in str(found.value)


def test_an_indicator_does_not_replace_a_column():
    data = {"age": [1.0, None], "age_missing": [0.0, 1.0]}
    with pytest.raises(JobError, match="there is a column age_missing already"):
        SimpleImputer(["age"], indicator=True).fit(data)
