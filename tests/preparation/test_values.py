"""Values from outside: one text of a category and one number, from whatever source; what no column holds is refused."""

from __future__ import annotations

import csv
import itertools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import JobError, NotRepresentable
from ephemeron.preparation import FeatureHasher, InProcess, Pipeline, StandardScaler, load_csv, load_libsvm, load_parquet
from ephemeron.preparation.values import InvalidValue, category_text, coded_texts, floats, number

pa = pytest.importorskip("pyarrow", reason="typed files")
pandas = pytest.importorskip("pandas", reason="data frames")
parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet files")

HERE = InProcess()


def whole(least, most):
    return st.integers(least, most)


TYPES = {
    "bool": (pa.bool_(), st.booleans()),
    "int8": (pa.int8(), whole(-128, 127)),
    "int64": (pa.int64(), whole(-(2**53), 2**53)),
    "uint32": (pa.uint32(), whole(0, 2**32 - 1)),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=True, allow_infinity=False) | st.sampled_from([3.0, 0.1, -0.0])),
    "float64": (pa.float64(), st.floats(allow_nan=True, allow_infinity=False) | st.sampled_from([7.0, 0.1, -0.0, 1e22])),
    "decimal": (pa.decimal128(12, 3), st.decimals(-(10**8), 10**8, places=3)),
    "string": (pa.string(), st.text(st.characters(codec="utf-8"), max_size=4) | st.sampled_from(["7", "7.0", "true", "True", "NA", ""])),
    "large_string": (pa.large_string(), st.sampled_from(["a", "é", "\u2028"])),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", "07"])),
    "dictionary of int": (pa.dictionary(pa.int32(), pa.int64()), whole(-9, 9)),
}


def sources(path):
    """The rows of a Parquet file as callers have them."""
    table = parquet.read_table(path)
    yield "table", table
    yield "batch", table.combine_chunks().to_batches()[0]
    frame = pandas.read_parquet(path)
    yield "pandas", frame
    yield "pandas of Arrow", pandas.read_parquet(path, dtype_backend="pyarrow")
    yield "nullable pandas", pandas.read_parquet(path, dtype_backend="numpy_nullable")
    yield "objects", frame.astype(object)
    yield "categories", frame.astype("category")
    yield "columns of pandas", dict(frame)
    yield "columns of Arrow", {name: table.column(name) for name in table.column_names}
    yield "Python", table.to_pydict()
    yield "scalars of Arrow", {name: list(table.column(name)) for name in table.column_names}
    yield "NumPy", {name: frame[name].to_numpy() for name in frame}


def entries(features):
    """Sparse features of each row, from whatever came back."""
    if hasattr(features, "indptr"):
        ends = features.indptr
        return [(features.indices[a:b].tolist(), features.values[a:b].tolist()) for a, b in itertools.pairwise(ends)]
    listed = {name: list(features[name]) for name in ("features.indices", "features.values")}
    return [
        ([int(i) for i in a], [float(v) for v in b])
        for a, b in zip(*([each.as_py() if hasattr(each, "as_py") else each for each in column] for column in listed.values()), strict=True)
    ]


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=5)
@given(st.data())
def test_categories_and_numbers_are_the_same_from_every_source(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("d")
    kind, values = TYPES[name]
    listed = data.draw(st.lists(values | st.none(), min_size=1, max_size=6))
    table = pa.table({"c": pa.array(listed, kind), "n": pa.array(range(len(listed)), pa.int16())})
    parquet.write_table(table, folder / "t.parquet")
    raw = load_parquet(str(folder / "t.parquet"), out=str(folder / "raw"), columns={"c": "categorical"}, pool=HERE)
    pipeline = Pipeline([FeatureHasher(["c"], n_features=1 << 20, seed=1)]).fit(raw, pool=HERE)
    prepared = pa.concat_tables(pipeline.transform(raw, out=str(folder / "out"), pool=HERE).tables())
    expected = entries(prepared.select(["features.indices", "features.values"]).to_pydict())
    for source, rows in sources(folder / "t.parquet"):
        made = pipeline.transform(rows)
        features = made["features"] if isinstance(made, dict) else made
        assert entries(features) == expected, (source, listed)
    one_by_one = [pipeline.transform({"c": value, "n": 1})["features"] for value in table.column("c").to_pylist()]
    assert [entries(each)[0] for each in one_by_one] == expected
    if "string" in name or name == "dictionary":
        return
    numbers = load_parquet(str(folder / "t.parquet"), out=str(folder / "numbers"), pool=HERE)
    stored = [math.nan if v is None else v for v in pa.concat_tables(numbers.tables()).column("c").to_pylist()]
    for source, rows in sources(folder / "t.parquet"):
        shown = StandardScaler(["c"], with_mean=False, with_std=False).fit({"c": [0.0, 1.0]}).transform(rows)
        got = shown.column("c").to_pylist() if hasattr(shown, "column") else list(shown["c"])
        np.testing.assert_array_equal([math.nan if v is None else v for v in got], stored, err_msg=source)


def test_texts_of_csv_are_the_categories_that_callers_give(tmp_path):
    texts = ["007", "7.0", "True", "true", "1e3", "7", "é", ""]
    (tmp_path / "t.csv").write_text("c,n\n" + "".join(f"{text},{n}\n" for n, text in enumerate(texts)))
    raw = load_csv(str(tmp_path / "t.csv"), out=str(tmp_path / "raw"), columns={"c": "categorical"}, pool=HERE)
    pipeline = Pipeline([FeatureHasher(["c"], n_features=1 << 20)]).fit(raw, pool=HERE)
    expected = entries(pipeline.transform(raw, out=str(tmp_path / "out"), pool=HERE).read(0).to_pydict())
    assert len({tuple(indices) for indices, _ in expected}) == len(texts)
    with open(tmp_path / "t.csv") as file:
        of_reader = [row["c"] or None for row in csv.DictReader(file)]  # what is absent in a file
    for rows in ({"c": of_reader}, pandas.read_csv(tmp_path / "t.csv", dtype={"c": str})):
        made = pipeline.transform(rows)
        assert entries(made["features"] if isinstance(made, dict) else made) == expected
    numbers = pipeline.transform({"c": [7, 7.0, True], "n": [0, 0, 0]})["features"]
    assert entries(numbers) == [expected[5], expected[5], expected[3]]


def test_a_category_has_one_text():
    same = {
        "7": [7, 7.0, np.int8(7), np.float32(7), Decimal("7.00"), "7", np.str_("7"), pa.scalar(7), np.array(7)],
        "true": [True, np.True_, "true", pa.scalar(True)],
        "0.1": [0.1, Decimal("0.10"), "0.1"],
        "0": [0, -0.0, Decimal("-0.00"), np.float64(-0.0)],
        "0.0000001": [1e-7, Decimal("1E-7")],
        "10000000000000000000000": [1e22, 10**22, Decimal("1e22")],
        "inf": [math.inf, Decimal("Infinity")],
        None: [None, math.nan, np.float32("nan"), pandas.NA, pandas.NaT, Decimal("NaN"), Decimal("sNaN"), pa.scalar(None)],
    }
    for text, values in same.items():
        assert [category_text(value) for value in values] == [text] * len(values)
    assert category_text(np.float32(0.1)) == "0.10000000149011612"
    for value in (b"a", [1], {"a": 1}, object(), 1j, np.datetime64("2026-01-01"), pandas.Timestamp(0), "\ud800", 10**5000):
        with pytest.raises(InvalidValue):
            category_text(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_number_reads_back(value):
    assert float(category_text(value)) == value
    assert number(category_text(value)) == value or abs(value) > 2**53


def test_what_float64_does_not_hold_is_no_number():
    assert [number(v) for v in (True, np.int8(3), Decimal("0.5"), "1e3", " 7 ", 2**53, -(2**60))] == [1, 3, 0.5, 1000, 7, 2**53, -(2**60)]
    assert math.isnan(number(pandas.NA))
    for value in (
        2**53 + 1,
        10**400,
        "1e400",
        "1e-400",
        "9007199254740993",
        Decimal("1e-400"),
        "1_2",
        "x",
        "",
        "nan",
        b"1",
        1j,
        Decimal(2**53 + 1),
        [1],
    ):
        with pytest.raises(InvalidValue):
            number(value)
    found, wrong = floats(pa.chunked_array([[1, None], [2**53 + 1, 2**60, -(2**53) - 1]]))
    assert np.array_equal(found[[0, 1, 3]], [1, np.nan, 2**60], equal_nan=True)
    assert list(wrong) == [2, 4]
    assert floats(np.array([2**64 - 1, 3], np.uint64))[1].keys() == {0}
    assert floats(np.array(3))[0].tolist() == floats(np.int64(3))[0].tolist() == [3]
    assert StandardScaler().fit({"x": (n for n in (1, 3))}).mean_.tolist() == [2]
    codes, texts = coded_texts([1, True, "1", None, 1.0, "true"])
    assert (codes.tolist(), texts) == ([0, 1, 0, -1, 0, 1], ["1", "true"])


def test_lists_of_numbers_are_converted_at_once(monkeypatch):
    def one(value):
        raise AssertionError(f"{value} is looked at by itself")

    monkeypatch.setattr("ephemeron.preparation.values.number", one)
    found, wrong = floats([0.5, None, 3, True, float("nan")])
    np.testing.assert_array_equal(found, [0.5, np.nan, 3, 1, np.nan])
    assert wrong == {}


def test_a_refusal_names_column_and_row(tmp_path):
    pipeline = Pipeline([FeatureHasher(n_features=8)]).fit({"x": [1.0, 2.0], "u": ["a", "b"]})

    def refused(text, data):
        with pytest.raises(JobError, match=text):
            pipeline.transform(data)

    refused("column u should have categories; row 1: a value of type bytes", {"x": [1, 2], "u": ["a", b"b"]})
    refused("column x should have numbers; row 1: 9007199254740993 is an integer beyond", {"x": [1, 2**53 + 1], "u": ["a", "b"]})
    refused("column x should have numbers; row 0: 'one' is not a number", {"x": ["one"], "u": ["a"]})
    refused("hash: column x, row 1: 1e[+]39 is beyond float32; scale the column first", {"x": [1, 1e39], "u": ["a", "b"]})
    refused("hash: column x, row 0: 1e-50 is beyond float32", {"x": [1e-50], "u": ["a"]})
    refused("hash: column x, row 0: inf is beyond float32", {"x": [math.inf], "u": ["a"]})
    with pytest.raises(NotRepresentable, match="hash: column x, z, row 1: a sum in a bucket is beyond float32"):
        FeatureHasher(n_features=1).fit_transform({"x": [1, 3e38], "z": [1, 3e38]})
    frame = pandas.DataFrame([[1, "a", 2]], columns=["x", "u", "x"])
    refused("the data frame has two columns 'x'", frame)
    refused("Series has no columns", frame["u"])


def test_a_data_frame_comes_back_with_its_index():
    frame = pandas.DataFrame({"x": [1.0, None, 3.0], "u": ["a", None, "b"], "y": [1, 2, 3]}, index=[7, 5, 9])
    scaled = StandardScaler(["x"]).fit(frame).transform(frame)
    assert isinstance(scaled, pandas.DataFrame)
    assert scaled.index.tolist() == [7, 5, 9]
    assert list(scaled.columns) == ["x", "u", "y"]
    np.testing.assert_array_equal(scaled["x"], [-1, np.nan, 1])
    assert scaled["u"].isna().tolist() == [False, True, False]
    hashed = FeatureHasher(["x", "u"], n_features=1 << 20).fit(frame).transform(frame)
    assert list(hashed.columns) == ["y", "features.indices", "features.values"]
    assert [len(each) for each in hashed["features.indices"]] == [2, 0, 2]
    assert FeatureHasher(["x", "u"], n_features=1 << 20).fit(frame).transform(frame.iloc[:0]).shape == (0, 3)
    assert pa.Table.from_pandas(hashed).column("features.indices").type == pa.list_(pa.int64())


def test_invalid_numbers_of_files_are_invalid_rows(tmp_path):
    table = pa.table({"id": [1, 2**53 + 1, 3, None], "x": [1.0, 2.0, math.nan, 4.0]})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(JobError, match=r"t.parquet, row 2, column id: 9007199254740993 is an integer beyond 2\*\*53"):
        load_parquet(str(tmp_path / "t.parquet"), out=str(tmp_path / "a"), pool=HERE)
    kept = load_parquet(str(tmp_path / "t.parquet"), out=str(tmp_path / "b"), on_error="quarantine", pool=HERE)
    assert kept.read(0).column("id").to_pylist() == [1, 3, None]
    assert kept.read(0).column("x").to_pylist() == [1, None, 4]  # NaN is absent
    assert "9007199254740993" in (tmp_path / "b" / "rejected.jsonl").read_text()
    as_text = load_parquet(str(tmp_path / "t.parquet"), out=str(tmp_path / "c"), columns={"id": "categorical"}, pool=HERE)
    assert as_text.read(0).column("id").to_pylist() == ["1", "9007199254740993", "3", None]
    for text, column in (("1:1e39", "1e39"), ("1:-1e300", "-1e300"), ("1:1e-50", "1e-50"), ("1:1 2:1e-400", "1e-400")):
        (tmp_path / "t.svm").write_text(f"0 1:0 2:0.0\n1 {text}\n1 3:1\n")
        with pytest.raises(JobError, match=f"t.svm, line 2, column features: {column} is beyond float32"):
            load_libsvm(str(tmp_path / "t.svm"), out=str(tmp_path / "d"), pool=HERE)
    left = load_libsvm(str(tmp_path / "t.svm"), out=str(tmp_path / "e"), on_error="skip", pool=HERE)
    assert left.read(0).column("label").to_pylist() == [0, 1]


def exact(values):
    """Standardised values by exact arithmetic."""
    fractions = [Fraction(value) for value in values]
    mean = sum(fractions) / len(fractions)
    variance = sum((value - mean) ** 2 for value in fractions) / len(fractions)
    scale = 10**400
    root = Fraction(math.isqrt(int(variance * scale**2)), scale)
    return [float((value - mean) / root) if root else 0.0 for value in fractions]


@pytest.mark.parametrize(
    "values",
    [
        [1e200, -1e200, 3e200],
        [1e-200, 3e-200],
        [1e160, 2e160],
        [1.7e308, -1.7e308, 0.0],
        [1.7e308, -1.7e308, -1.7e308],
        [14.62] * 9,
        [1e8, 1e8 + 2e-8, 1e8],
        [5.0],
        [0.0, 1e-170],
        [1e300, 1e-300],
        [0.1, 0.1 + 2**-56],
    ],
)
def test_columns_at_the_ends_of_float64_are_standardised_exactly(tmp_path, values):
    scaler = StandardScaler().fit({"x": values})
    np.testing.assert_allclose(scaler.transform({"x": values})["x"], exact(values), rtol=1e-12, atol=1e-15)
    scaler.save(str(tmp_path / "p.json"))
    again = Pipeline.load(tmp_path / "p.json").transform({"x": values})["x"]
    np.testing.assert_array_equal(again, scaler.transform({"x": values})["x"])


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5))
def test_standardised_values_are_the_exact_ones_or_refused(values):
    try:
        got = StandardScaler().fit_transform({"x": values})["x"]
    except JobError as e:
        assert "column x" in str(e)  # noqa: PT017 - either is right
        return
    np.testing.assert_allclose(got, exact(values), rtol=1e-9, atol=1e-12)
