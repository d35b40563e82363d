"""Features: the same at inference as in training, from every source; numbers that float32 or float64 does not hold; models, states, bills."""

from __future__ import annotations

import io
import json
import math
import tempfile
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
from pyarrow import parquet

import ephemeron.preparation as prep
from benchmarks.adversity_cases import case
from ephemeron.data.catalog import DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.catalog.unpack import DECODERS
from ephemeron.data.flow import Flow
from ephemeron.errors import JobError
from ephemeron.events import StoreRequests, Traffic
from ephemeron.prices import load_prices
from ephemeron.runs.cost import CostMeter
from ephemeron.sparse.models import Batch, LogisticRegression

SKEW, RANGE, SMALLER, BILLS = ("other features at inference", "beyond float32 and float64", "smaller wrong results", "bills")
HERE = prep.InProcess()
TYPES: dict[str, Any] = {
    "bool": pa.array([True, False, None]),
    "int64 with nulls": pa.array([3, None, -7]),
    "uint8": pa.array([0, 255, 1], pa.uint8()),
    "float32": pa.array([3.0, 0.1, None], pa.float32()),
    "float64": pa.array([3.0, 0.1, float("nan")]),
    "decimal": pa.array([Decimal("3.00"), Decimal("0.10"), None], pa.decimal128(9, 2)),
    "text": pa.array(["3", "true", None]),
    "dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
}
READ: dict[str, Callable[[Path], Any]] = {
    "pandas": pandas.read_parquet,
    "Arrow types in pandas": partial(pandas.read_parquet, dtype_backend="pyarrow"),
    "nullable types in pandas": partial(pandas.read_parquet, dtype_backend="numpy_nullable"),
    "categories in pandas": lambda path: pandas.read_parquet(path).astype("category"),
    "a table": parquet.read_table,
    "a record batch": lambda path: parquet.read_table(path).to_batches()[0],
    "Python": lambda path: parquet.read_table(path).to_pydict(),
    "NumPy": lambda path: {name: column.to_numpy() for name, column in pandas.read_parquet(path).items()},
}


def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="features-"))


def refused(make: Callable[[], Any], *words: str) -> None:
    """Raises unless a call is refused with these words."""
    try:
        said = f"not refused: {make()}"
    except JobError as e:
        if all(word in str(e) for word in words):
            return
        said = f"{e} does not name {', '.join(words)}"
    raise AssertionError(said)


def buckets(features: Any) -> list[list[int]]:
    if isinstance(features, prep.SparseRows):
        return [part.tolist() for part in np.split(features.indices, features.indptr[1:-1])]
    column = features["features.indices"]
    return [[int(i) for i in (each.as_py() if hasattr(each, "as_py") else each)] for each in column]


def same_buckets(kind: str, source: str) -> None:
    place = folder()
    parquet.write_table(pa.table({"c": TYPES[kind]}), place / "t.parquet")
    raw = prep.load_parquet(str(place / "t.parquet"), out=str(place / "raw"), columns={"c": "categorical"}, pool=HERE)
    pipeline = prep.Pipeline([prep.FeatureHasher()]).fit(raw, pool=HERE)
    stored = pipeline.transform(raw, out=str(place / "out"), pool=HERE).read(0)
    made = pipeline.transform(READ[source](place / "t.parquet"))
    assert buckets(made["features"] if isinstance(made, dict) else made) == buckets(stored.to_pydict())


for _kind in TYPES:
    for _source in READ:
        case(SKEW, f"{_kind} from {_source}")(partial(same_buckets, _kind, _source))


@case(SKEW, "a data frame comes back as one, with its index")
def frame() -> None:
    given = pandas.DataFrame({"x": [1.0, 3.0], "u": ["a", "b"]}, index=[5, 7])
    got = prep.StandardScaler(["x"]).fit(given).transform(given)
    assert isinstance(got, pandas.DataFrame)
    assert (got.index.tolist(), got["x"].tolist(), got["u"].tolist()) == ([5, 7], [-1, 1], ["a", "b"])


@case(SKEW, "bytes, dates and lists are no categories")
def no_categories() -> None:
    pipeline = prep.Pipeline([prep.FeatureHasher()]).fit({"u": ["a"]})
    for value in (b"a", pandas.Timestamp(0), np.datetime64("2026-01-01"), [1]):
        refused(lambda v=value: pipeline.transform({"u": [v, "a"]}), "column u", "row 0")  # type: ignore[misc]


def standardised(values: list[float]) -> None:
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / len(exact)
    root = Fraction(math.isqrt(int(variance * 10**800)), 10**400)
    right = [float((value - mean) / root) if root else 0.0 for value in exact]
    scaler = prep.StandardScaler().fit({"x": values})
    np.testing.assert_allclose(scaler.transform({"x": values})["x"], right, rtol=1e-12)
    scaler.save(str(folder() / "p.json"))


for _values in (
    [1e200, -1e200, 3e200],
    [1e-200, 3e-200],
    [1e160, 2e160],
    [1.7e308, -1.7e308, 0.0],
    [1e8, 1e8 + 2e-8, 1e8],
    [14.62] * 9,
    [0.0, 1e-170],
):
    case(RANGE, f"standardise {_values}")(partial(standardised, _values))


@case(RANGE, "standard deviations that float64 does not hold are refused")
def denormal() -> None:
    refused(lambda: prep.StandardScaler().fit({"x": [5e-324, 1e-323]}), "column x", "standard deviation")


@case(RANGE, "min_max of ranges of 1e-310 and 3.4e308")
def ranges() -> None:
    for values, right in (([0.0, 1e-310], [0, 1]), ([1.7e308, -1.7e308, 0.0], [1, 0, 0.5])):
        np.testing.assert_allclose(prep.MinMaxScaler().fit_transform({"x": values})["x"], right)


@case(RANGE, "quantile bins at the ends of float64")
def bins() -> None:
    binner = prep.QuantileBinner(n_bins=2).fit({"x": [1.7e308, -1.7e308, 1e308, -1e308]})
    assert binner.transform({"x": [1.0, -1.0]})["x"] == ["1", "0"]


def hashed(value: float) -> None:
    pipeline = prep.Pipeline([prep.FeatureHasher()]).fit({"x": [1.0]})
    refused(lambda: pipeline.transform({"x": [1.0, value]}), "column x", "row 1", "float32")


for _value in (1e39, -1e300, 1e-50, math.inf):
    case(RANGE, f"hash {_value}")(partial(hashed, _value))


@case(RANGE, "a sum in a bucket beyond float32")
def sums() -> None:
    refused(lambda: prep.FeatureHasher(n_features=1).fit_transform({"x": [3e38], "z": [3e38]}), "float32")


def libsvm(entry: str) -> None:
    place = folder()
    (place / "t.svm").write_text(f"0 1:1\n1 {entry}\n")
    load = partial(prep.load_libsvm, str(place / "t.svm"), pool=HERE)
    refused(lambda: load(out=str(place / "a")), "line 2", "float32")
    assert len(load(out=str(place / "b"), on_error="skip")) == 1


for _entry in ("1:1e39", "3:-1e300", "1:1e-50", "2:1e-400"):
    case(RANGE, f"LIBSVM {_entry}")(partial(libsvm, _entry))


@case(RANGE, "integers of Parquet above 2^53")
def identifiers() -> None:
    place = folder()
    parquet.write_table(pa.table({"id": [1, 2**53 + 1]}), place / "t.parquet")
    load = partial(prep.load_parquet, str(place / "t.parquet"), pool=HERE)
    refused(lambda: load(out=str(place / "a")), "row 2", "column id", "9007199254740993")
    kept = load(out=str(place / "b"), columns={"id": "categorical"})
    assert kept.read(0).column("id").to_pylist() == ["1", "9007199254740993"]


@case(RANGE, "integers of callers above 2^53")
def integers() -> None:
    scaler = prep.StandardScaler().fit({"x": [1.0, 2.0]})
    for given in ([2**53 + 1], np.array([2**53 + 1]), pa.array([2**53 + 1]), pandas.array([2**53 + 1], "Int64")):
        refused(lambda g=given: scaler.transform({"x": g}), "column x", "row 0")  # type: ignore[misc]


@case(SMALLER, "NaN of Parquet is absent")
def absent() -> None:
    place = folder()
    parquet.write_table(pa.table({"x": [1.0, math.nan]}), place / "t.parquet")
    loaded = prep.load_parquet(str(place / "t.parquet"), out=str(place / "raw"), pool=HERE)
    assert loaded.read(0).column("x").to_pylist() == [1.0, None]


@case(SMALLER, "-0.0 does not change a version")
def zeros() -> None:
    fitted = [prep.MinMaxScaler().fit({"x": values}) for values in ([-0.0, 0.0, 1.0], [0.0, -0.0, 1.0])]
    assert fitted[0].fitted() == fitted[1].fitted()
    assert not np.signbit(fitted[0].data_min_).any()


@case(SMALLER, "accuracy where all weights are 0")
def accuracy() -> None:
    model = LogisticRegression(features=3)
    batch = Batch(np.arange(5), np.zeros(4, np.int64), np.ones(4, np.float32), np.array([0, 1, 0, 0]))
    rows = model.rows(batch)
    values = {name: np.zeros((len(rows[name]), table.width), np.float32) for name, table in model.tables.items()}
    assert model.evaluate(batch, rows, values)["accuracy"] == (3, 4)
    values["weights"][:] = -50
    assert 0 < model.predict(batch, rows, values)[0] < 1e-40


def states(one: Callable[[], Flow], other: Callable[[], Flow]) -> None:
    state = json.loads(json.dumps(one().prepare_read().to_shuffled(2).state_dict()))
    one().prepare_read().to_shuffled(2).load_state_dict(state)
    refused(lambda: other().prepare_read().to_shuffled(2).load_state_dict(state), "the state has another")


class _Files(list[int]):
    def __init__(self, path: str) -> None:
        super().__init__(range(8))
        self.path = path


def _flow(function: Any, path: str = "/a") -> Flow:
    return Flow("a/b").dataset(_Files(path)).map("step", function)


case(SMALLER, "a loader state of another lambda")(partial(states, lambda: _flow(lambda x: x + 1), lambda: _flow(lambda x: x - 1)))
case(SMALLER, "a loader state of another folder")(partial(states, lambda: _flow(abs), lambda: _flow(abs, "/b")))


@case(SMALLER, "grey images of 16 bits")
def sixteen_bits() -> None:
    from PIL import Image

    grey, data = np.array([[0, 255, 256, 65535]], np.uint16), io.BytesIO()
    Image.fromarray(grey).save(data, "PNG")
    assert np.array_equal(DECODERS["image"](data.getvalue(), {})[..., 0], grey)


@case(SMALLER, "two COCO images of one id")
def coco() -> None:
    place = folder()
    (place / "a.png").write_bytes(b"x")
    images = [{"id": 1, "file_name": "a.png"}, {"id": 1, "file_name": "b.png"}]
    (place / "i.json").write_text(json.dumps({"images": images, "categories": [], "annotations": []}))
    store = DatasetStore.open(str(folder()))
    refused(lambda: import_dataset("coco", str(place), "me/coco", store, options={"annotations": "i.json"}), "two images", "id 1")


@case(SMALLER, "a split without rows for training")
def split() -> None:
    place = folder()
    (place / "t.csv").write_text("u,x\n" + "one,1\n" * 20)
    raw = prep.load_csv(str(place / "t.csv"), out=str(place / "raw"), pool=HERE)
    sides = [prep.HashSplit(0.99, key=["u"], seed=seed) for seed in range(3)]
    refused(lambda: [prep.Pipeline([prep.StandardScaler()]).fit(raw, split=side, pool=HERE) for side in sides], "none for training")


@case(SMALLER, "arguments of other types")
def arguments() -> None:
    refused(lambda: prep.FeatureHasher(1 << 20), "n_features=1048576")  # type: ignore[arg-type]
    refused(lambda: prep.StandardScaler(5), "no list of names")  # type: ignore[arg-type]
    refused(lambda: prep.FeatureHasher(n_features="many"), "no whole number")  # type: ignore[arg-type]


@case(BILLS, "requests of shards and clients are counted once and priced")
def bills() -> None:
    meter = CostMeter(load_prices("objects", servers=True))
    for t, source, puts in ((1.0, "a", 10), (2.0, "a", 30), (3.0, "b", 5)):
        meter.feed(StoreRequests(t=t, source=source, traffic=Traffic(puts=puts)))
    assert meter.traffic == Traffic(puts=35)
    assert meter.cost_usd(3.0) >= 35 * meter.prices.put_usd > 0
