"""Transforms and pipelines: equal to scikit-learn's, independent of the partitioning, saved and applied anywhere."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.data.tables import Column, TableWriter, csr_batch
from ephemeron.errors import JobError
from ephemeron.preparation import FeatureHasher, HashSplit, InProcess, MinMaxScaler, Pipeline, QuantileBinner, SparseRows, StandardScaler
from ephemeron.preparation.applying import apply_to_dataset
from ephemeron.preparation.columns import from_table, length_of, to_table

pa = pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")

HERE = InProcess()
COLUMNS = (
    Column(name="click", kind="label", dtype="float32"),
    Column(name="age", kind="numeric", dtype="float64"),
    Column(name="income", kind="numeric", dtype="float64"),
    Column(name="site", kind="categorical", dtype="string"),
)


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    age = np.where(rng.random(count) < 0.1, np.nan, rng.normal(40, 10, count))
    site = [None if rng.random() < 0.1 else f"s{rng.zipf(1.5) % 1000}" for _ in range(count)]
    return {"click": rng.integers(0, 2, count).astype(float), "age": age, "income": rng.lognormal(8, 1, count), "site": site}


def stored(folder, data, ends):
    """A dataset with partitions that end at these rows."""
    from ephemeron.preparation.columns import from_mapping

    table = to_table(from_mapping(data, COLUMNS), COLUMNS)
    writer = TableWriter(str(folder), COLUMNS)
    edges = [0, *ends, table.num_rows]
    parts = [writer.write(n, table.slice(a, b - a)) for n, (a, b) in enumerate(itertools.pairwise(edges))]
    return writer.finish("people", parts)


def whole(dataset):
    return pa.concat_tables(dataset.tables()).combine_chunks()


def steps():
    return [StandardScaler(["age"]), MinMaxScaler(["income"]), FeatureHasher(n_features=512, seed=3)]


@pytest.mark.parametrize("ends", [[], [7], [100, 100, 333], list(range(0, 500, 40))])
def test_fitted_attributes_equal_those_of_scikit_learn_and_numpy(tmp_path, ends):
    preprocessing = pytest.importorskip("sklearn.preprocessing", reason="the transforms to compare with")
    data = rows(500)
    dataset = stored(tmp_path, data, ends)
    numbers = np.column_stack([data["age"], data["income"]])
    for ours, theirs in (
        (StandardScaler(), preprocessing.StandardScaler()),
        (MinMaxScaler(feature_range=(-1, 2)), preprocessing.MinMaxScaler(feature_range=(-1, 2))),
    ):
        ours.fit(dataset, pool=HERE)
        theirs.fit(numbers)
        for name in ("mean_", "var_", "scale_", "min_", "data_min_", "data_max_", "data_range_"):
            if hasattr(theirs, name):
                np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-12)
        assert ours.feature_names_in_ == ["age", "income"]
        np.testing.assert_allclose(ours.transform(numbers), theirs.transform(numbers), rtol=1e-12, atol=1e-12)
        table = whole(ours.transform(dataset, out=str(tmp_path / ours.step), pool=HERE))
        np.testing.assert_allclose(table.column("age").to_numpy(), theirs.transform(numbers)[:, 0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(StandardScaler(["income"]).fit(dataset, pool=HERE).mean_, np.mean(data["income"]), rtol=1e-12)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 300), max_size=5).map(sorted))
def test_a_pipeline_is_the_same_whatever_the_partitioning(tmp_path_factory, ends):
    folder = tmp_path_factory.mktemp("d")
    data = rows(300)
    made = Pipeline([QuantileBinner(["income"], n_bins=4), *steps()[::2]]).fit(stored(folder, data, ends), pool=HERE)
    once = Pipeline([QuantileBinner(["income"], n_bins=4), *steps()[::2]]).fit({name: data[name] for name in ("age", "income", "site")})
    assert [s.fitted() for s in made.steps] == [s.fitted() for s in once.steps]


def test_steps_are_fitted_in_as_few_passes_as_their_order_allows():
    made = Pipeline([StandardScaler(), FeatureHasher()])
    made.bind(COLUMNS)
    assert next(made.passes()) == 2
    made = Pipeline([QuantileBinner(), FeatureHasher()])
    made.bind(COLUMNS)
    assert next(made.passes()) == 1
    made = Pipeline([MinMaxScaler(["age"]), StandardScaler()])
    made.bind(COLUMNS)
    assert next(made.passes()) == 1


def test_hashing_is_what_its_definition_says():
    import xxhash

    hasher = FeatureHasher(n_features=64, seed=5)
    data = {"age": [2.0, float("nan"), 0.0], "site": ["a", "b", None], "lang": ["a", "a", "é"]}
    got = hasher.fit_transform(data)["features"]

    def bucket(column, text):
        return xxhash.xxh3_64_intdigest(text.encode(), xxhash.xxh3_64_intdigest(column.encode(), 5)) % 64

    dense = np.zeros((3, 64), np.float32)
    dense[0, bucket("age", "")] += 2
    for n, text in ((0, "a"), (1, "b")):
        dense[n, bucket("site", text)] += 1
    for n, text in enumerate("aaé"):
        dense[n, bucket("lang", text)] += 1
    assert isinstance(got, SparseRows)
    assert np.array_equal(got.toarray(), dense)
    keys = {("age", ""), ("site", "a"), ("site", "b"), ("lang", "a"), ("lang", "é")}
    assert hasher.distinct_ == len(keys)
    assert hasher.collisions_ == len(keys) - len({bucket(*key) for key in keys})


@given(st.integers(1, 12), st.booleans())
def test_entries_of_one_bucket_are_summed_and_indices_rise(n_features, signs):
    data = rows(60, seed=n_features)
    del data["click"]
    hasher = FeatureHasher(n_features=n_features, alternate_sign=signs)
    got = hasher.fit_transform(data)["features"]
    for n in range(60):
        indices = got.indices[got.indptr[n] : got.indptr[n + 1]]
        assert np.all(np.diff(indices) > 0)
    total = sum(
        FeatureHasher([name], n_features=n_features, alternate_sign=signs).fit_transform({name: data[name]})["features"].toarray()
        for name in data
    )
    np.testing.assert_allclose(got.toarray(), total, rtol=1e-6, atol=1e-6)


def test_bins_hold_equal_numbers_of_rows():
    values = np.random.default_rng(0).lognormal(size=1000)
    binner = QuantileBinner(n_bins=4)
    got = binner.fit_transform({"x": [*values.tolist(), None]})["x"]
    assert [got.count(str(n)) for n in range(4)] == [250] * 4
    assert got[-1] is None
    np.testing.assert_allclose(binner.bin_edges_[0], np.quantile(values, np.linspace(0, 1, 5)))
    constant = QuantileBinner().fit({"x": [3.0] * 9})
    assert constant.transform({"x": [1.0, 3.0, 5.0]})["x"] == ["0"] * 3
    assert constant.n_bins_.tolist() == [1]


def test_a_saved_pipeline_gives_the_same_rows(tmp_path):
    data = rows(200)
    pipeline = Pipeline(steps()).fit(data, label="click")
    pipeline.save(tmp_path / "p.json")
    loaded = Pipeline.load(tmp_path / "p.json")
    assert loaded.version_ == pipeline.version_
    a, b = pipeline.transform(data)["features"], loaded.transform(data)["features"]
    assert np.array_equal(a.indices, b.indices)
    assert np.array_equal(a.values, b.values)
    refitted = Pipeline(steps()).fit(rows(200, seed=1), label="click")
    assert refitted.version_ != pipeline.version_


def test_inference_needs_neither_pyarrow_nor_functions(tmp_path):
    data = rows(50)
    pipeline = Pipeline(steps()).fit(data, label="click")
    pipeline.save(tmp_path / "p.json")
    program = (
        "import sys, json; sys.modules['pyarrow'] = None\n"
        "from ephemeron.preparation import Pipeline\n"
        "p = Pipeline.load(sys.argv[1])\n"
        "f = p.transform({'age': 31.0, 'income': 900.0, 'site': 's1'})['features']\n"
        "print(json.dumps([f.indices.tolist(), f.values.tolist()]))\n"
        "assert not [m for m in sys.modules if m.startswith(('ephemeron.executor', 'ephemeron.training', 'torch', 'scipy'))]"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path / "p.json")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    here = pipeline.transform({"age": [31.0], "income": [900.0], "site": ["s1"]})["features"]
    assert json.loads(ran.stdout) == [here.indices.tolist(), here.values.tolist()]


def test_tables_and_data_frames_are_returned_as_they_came():
    pandas = pytest.importorskip("pandas", reason="the data frame")
    data = rows(30)
    pipeline = Pipeline(steps()).fit(pandas.DataFrame(data), label="click")
    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in data.items() if name != "click"})
    got = Pipeline([StandardScaler(["age"])]).fit(table).transform(table)
    assert isinstance(got, pa.Table)
    assert got.column("site").to_pylist() == data["site"]
    frame = pipeline.transform(pandas.DataFrame(data))
    assert np.array_equal(np.concatenate(frame["features.values"]), pipeline.transform(data)["features"].values)
    assert np.array_equal(np.concatenate(frame["features.indices"]), pipeline.transform(data)["features"].indices)


def test_a_dataset_is_transformed_into_partitions_of_equal_size(tmp_path):
    dataset = stored(tmp_path / "raw", rows(6000), [100, 4000])
    pipeline = Pipeline(steps()).fit(dataset, pool=HERE)
    got = pipeline.transform(dataset, out=str(tmp_path / "out"), pool=HERE, partition_mb=0.02)
    sizes = [part.nbytes for part in got.partitions]
    assert max(sizes) < 1.2 * min(sizes)
    here = pipeline.apply(from_table(whole(dataset), dataset.schema))
    batch = csr_batch(whole(got))
    assert np.array_equal(batch.indices, here["features"].indices)
    assert np.array_equal(batch.values, here["features"].values)
    assert Pipeline.load(got).version_ == pipeline.version_
    assert pipeline.transform(dataset, out=str(tmp_path / "out"), pool=HERE, partition_mb=0.02).version == got.version
    with pytest.raises(JobError, match="holds what was prepared from other data or steps"):
        pipeline.transform(dataset, out=str(tmp_path / "out"), pool=HERE, partition_mb=0.5)


def test_a_row_is_on_the_same_side_whatever_the_partitioning(tmp_path):
    data = rows(2000)
    split, sides = HashSplit(0.3, key=["income"], seed=1), []
    for name, ends in (("a", []), ("b", [1, 999, 1200])):
        dataset = stored(tmp_path / name, data, ends)
        made = {
            side: apply_to_dataset(None, dataset, str(tmp_path / name / side), pool=HERE, split=split, side=side, partition_mb=0.01)
            for side in ("train", "test")
        }
        sides.append({side: whole(one).column("income").to_pylist() for side, one in made.items()})
    assert sides[0] == sides[1]
    assert sorted(sides[0]["train"] + sides[0]["test"]) == sorted(data["income"])
    assert abs(len(sides[0]["test"]) / 2000 - 0.3) < 0.05


@given(st.integers(0, 100))
def test_splits_of_sparse_and_absent_values_depend_on_the_rows_alone(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, 50)
    sparse = SparseRows(
        np.concatenate([[0], np.cumsum(lengths)]), rng.integers(0, 9, lengths.sum()), rng.normal(size=lengths.sum()).astype(np.float32), 9
    )
    data = {"s": sparse, "x": np.where(rng.random(50) < 0.5, np.nan, 0.0)}
    from ephemeron.preparation.columns import taken
    from ephemeron.preparation.hashing import row_hashes

    chosen = rng.random(50) < 0.5
    assert np.array_equal(row_hashes(data, ["s", "x"], 7)[chosen], row_hashes(taken(data, chosen), ["s", "x"], 7))
    assert length_of(taken(data, chosen)) == chosen.sum()


def test_rows_that_a_step_refuses_are_treated_as_on_error_says(tmp_path):
    data = rows(60)
    data["income"][[3, 41]] = 1e39, 1e-60
    dataset = stored(tmp_path / "raw", data, [30])
    pipeline = Pipeline([FeatureHasher(["income"], n_features=512)]).fit(dataset, pool=HERE)
    with pytest.raises(JobError, match=r"raw, row 4, column income: 1e\+39 is beyond float32; mend it"):
        pipeline.transform(dataset, out=str(tmp_path / "a"), pool=HERE, partition_mb=1e-4)
    kept = pipeline.transform(dataset, out=str(tmp_path / "a"), pool=HERE, partition_mb=1e-4, on_error="quarantine")
    assert (len(kept), kept.manifest.rejected) == (58, 2)
    found = [json.loads(line) for line in (tmp_path / "a" / "rejected.jsonl").read_text().splitlines()]
    assert [(each["row"], each["column"]) for each in found] == [(4, "income"), (42, "income")]
    with pytest.raises(JobError, match="was made without 2 rows that a step refuses"):
        pipeline.transform(dataset, out=str(tmp_path / "a"), pool=HERE, partition_mb=1e-4)
    split, sides = HashSplit(0.5, key=["age"]), []
    for side in ("train", "test"):
        out = str(tmp_path / side)
        sides.append(pipeline.transform(dataset, out=out, pool=HERE, split=split, side=side, on_error="skip", name=side))
    assert [sum(len(one) for one in sides), sum(one.manifest.rejected for one in sides)] == [58, 2]

    def two_passes():
        return Pipeline([FeatureHasher(["income"]), QuantileBinner(["age"]), FeatureHasher(["age"], output="ages")])

    assert two_passes().fit(dataset, pool=HERE, on_error="skip").fitted_ == 3
    with pytest.raises(JobError, match=r"raw, row 4, column income: 1e\+39 is beyond float32; mend it"):
        two_passes().fit(dataset, pool=HERE)
    of_train = [HashSplit(0.5, key=["age"], seed=seed) for seed in range(9)]
    row = from_table(dataset.read(1), dataset.schema)
    split = next(s for s in of_train if not s.is_test(row, ["age"])[11] and s.is_test(row, ["age"])[:11].any())
    data["income"][3] = 1.0
    one = stored(tmp_path / "one", data, [30])
    with pytest.raises(JobError, match=r"one, row 42, column income: 1e-60 is beyond float32; mend it"):
        two_passes().fit(one, pool=HERE, split=split)


def test_a_split_without_rows_for_training_is_refused(tmp_path):
    data = {**rows(40), "site": ["one"] * 40}
    dataset = stored(tmp_path / "raw", data, [20])
    at = from_table(dataset.read(0), dataset.schema)
    split = next(s for s in (HashSplit(0.5, key=["site"], seed=n) for n in range(99)) if s.is_test(at, ["site"]).all())
    for make in (
        lambda: Pipeline(steps()).fit(dataset, split=split, pool=HERE),
        lambda: apply_to_dataset(None, dataset, str(tmp_path / "out"), split=split, side="test", pool=HERE),
    ):
        with pytest.raises(JobError, match="split: all 40 rows are for testing, and none for training, by site; lower"):
            make()
    assert not (tmp_path / "out").exists()


def test_a_zero_with_a_sign_does_not_change_a_version(tmp_path):
    data = rows(12)
    data["age"] = np.array([-0.0, 0.0] * 6)
    fitted = [
        Pipeline([MinMaxScaler(["age"])]).fit(stored(tmp_path / str(n), data, ends), pool=HERE)
        for n, ends in enumerate(([], [1], [2, 5], [3]))
    ]
    assert len({one.version_ for one in fitted}) == 1


def test_mistakes_are_one_line_each(tmp_path):
    data = rows(10)

    def refused(text, make):
        with pytest.raises(JobError, match=text) as e:
            make()
        assert "\n" not in str(e.value)

    refused("standardise: unknown column agee; did you mean age", lambda: StandardScaler(["agee"]).fit(data))
    refused("standardise: column site is categorical; name numeric columns", lambda: StandardScaler(["site"]).fit(data))
    refused(r"columns = 'age' is text; write \['age'\]", lambda: StandardScaler("age"))
    refused("hash: columns = 1048576 is a number; write FeatureHasher[(]n_features=1048576", lambda: FeatureHasher(1 << 20))
    refused("columns = 5 is no list of names", lambda: StandardScaler(5))
    refused("columns = .* is no list of names", lambda: MinMaxScaler(["a", 3]))
    refused("hash: n_features = 'many' is no whole number", lambda: FeatureHasher(n_features="many"))
    refused("feature_range = .* is wider than float64", lambda: MinMaxScaler(feature_range=(-1.7e308, 1.7e308)))
    refused("column x has the standard deviation .* multiply", lambda: StandardScaler().fit({"x": [5e-324, 1e-323]}))
    refused(
        "standardise: column x, row 0: 1e[+]300 becomes infinite",
        lambda: StandardScaler().fit({"x": [1e-200, 3e-200]}).transform({"x": [1e300]}),
    )
    refused("hash: n_features = 0 should be from 1 to", lambda: FeatureHasher(n_features=0))
    refused("hash: there is a column age already", lambda: FeatureHasher(["site"], output="age").fit(data))
    refused("quantile_bins: n_bins = 1 is below 2", lambda: QuantileBinner(n_bins=1))
    refused("feature_range = .* is empty", lambda: MinMaxScaler(feature_range=(1, 0)))
    refused("split: test_fraction = 1 should be between", lambda: HashSplit(1))
    refused("a pipeline has no steps", lambda: Pipeline([]))
    refused("the pipeline is not fitted", lambda: Pipeline([StandardScaler()]).transform(data))
    refused("column age has 1 infinite values", lambda: StandardScaler().fit({"age": [1.0, float("inf")]}))
    refused("column income is missing", lambda: Pipeline(steps()).fit(data, label="click").transform({"age": [1.0], "site": ["a"]}))
    refused("column age should have numbers", lambda: StandardScaler().fit({"age": [1.0]}).transform({"age": ["x"]}))
    refused("the array has 2 columns, and 1 were fitted", lambda: StandardScaler().fit(np.ones((3, 1))).transform(np.ones((3, 2))))
    (tmp_path / "p.json").write_text("{}")
    refused("is no pipeline: KeyError", lambda: Pipeline.load(tmp_path / "p.json"))
    refused("cannot be read: No such file", lambda: Pipeline.load(tmp_path / "q.json"))
