"""Data as people have it: the same values through `data.source`, `Task.train_data` and `Flow.dataset`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ephemeron.data import DataSpec, load
from ephemeron.data.flow import Flow
from ephemeron.data.flow.from_job import make_flow
from ephemeron.data.flow_spec import DataProvider
from ephemeron.data.sources.adapters import Pairs, as_dataset, is_pair, is_place, split_of
from ephemeron.data.sources.datasets import stack
from ephemeron.errors import JobError
from ephemeron.training.driver.launching.training_data import training_data
from ephemeron.training.job.job_file import parse_job

ROWS = 6
X = np.arange(12.0).reshape(ROWS, 2) / 4
Y = np.arange(ROWS) % 3


def _pandas() -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y})


def _polars() -> Any:
    return pytest.importorskip("polars").DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y})


def _arrow() -> Any:
    return pytest.importorskip("pyarrow").table({"a": X[:, 0], "b": X[:, 1], "y": Y})


def _huggingface() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"a": X[:, 0], "b": X[:, 1], "y": Y})


def _columns() -> Any:
    return {"a": X[:, 0], "b": X[:, 1], "y": Y}


TABLES = (_pandas, _polars, _arrow, _huggingface, _columns)


def _files(folder: Path, kind: str) -> str:
    """Two files of three rows each, as a glob."""
    frame = _pandas()
    for n, part in enumerate((frame[:3], frame[3:])):
        getattr(part, f"to_{kind}")(folder / f"part-{n}.{kind}", index=False)
    (folder / "notes.txt").write_text("no data")
    return str(folder / f"*.{kind}")


def _same(samples: Any) -> None:
    assert (samples.inputs.dtype, samples.targets.dtype) == (np.float32, np.int64)
    assert np.array_equal(samples.inputs, X.astype(np.float32))
    assert np.array_equal(samples.targets, Y)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_samples_of_a_job_rows_of_a_task_and_of_a_flow(table: Callable[[], Any]) -> None:
    _same(stack(table(), "m:f", target="y"))
    rows = as_dataset(table(), "train_data of T")
    assert len(rows) == ROWS
    assert {name: float(value) for name, value in rows[3].items()} == {"a": 1.5, "b": 1.75, "y": 0}
    flow = Flow("a/b").dataset(table(), target="y")
    assert flow.source is not None
    row, target = flow.source.dataset[4]
    assert ({name: float(value) for name, value in row.items()}, target) == ({"a": 2.0, "b": 2.25}, 1)
    assert pickle.loads(pickle.dumps(flow.source.dataset))[4][1] == 1


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_of_rows(kind: str, tmp_path: Path) -> None:
    place = _files(tmp_path, kind)
    whole = load(DataSpec(source="files", path=Path(place), target_column="y", test_fraction=0), seed=0)
    _same(whole.train)
    _same(stack(tmp_path, "m:f", target="y"))
    rows = as_dataset(place, "train_data of T")
    assert rows[4][0] == {"a": 2.0, "b": 2.25, "y": 1}
    flow = Flow("a/b").dataset(place, target="y")
    assert flow.source is not None
    again = pickle.loads(pickle.dumps(flow.source.dataset))
    assert again[5] == ({"a": 2.5, "b": 2.75}, 2)


def test_a_folder_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part, classes in (("train", "ab"), ("val", "ab")):
        for n, name in enumerate(classes):
            (tmp_path / part / name).mkdir(parents=True)
            image.new("RGB", (4, 3), (255 * n, 0, 51)).save(tmp_path / part / name / "1.png")
    data = load(DataSpec(source="files", path=tmp_path), seed=0)
    assert data.train.inputs.shape == (2, 3, 3, 4)
    assert data.train.inputs.dtype == np.float32
    assert data.test.inputs[:, :, 0, 0].tolist() == [[0, 0, np.float32(0.2)], [1, 0, np.float32(0.2)]]
    assert data.train.targets.tolist() == [0, 1]
    flow = Flow("a/b").dataset(tmp_path / "train")
    assert flow.source is not None
    stored, target = flow.source.dataset[1]
    assert (stored.shape, stored.dtype, target) == ((3, 4, 3), np.uint8, 1)


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    library = pytest.importorskip("datasets")
    library.DatasetDict({"train": _huggingface(), "test": _huggingface().select(range(2))}).save_to_disk(str(tmp_path / "both"))
    both = load(DataSpec(source="files", path=tmp_path / "both", target_column="y"), seed=0)
    _same(both.train)
    assert len(both.test) == 2
    assert as_dataset(tmp_path / "both" / "train", "it")[1]["a"] == 0.5
    with pytest.raises(JobError, match="is a set of splits"):
        as_dataset(tmp_path / "both", "it")


def test_pairs_are_arrays_tensors_or_a_table_and_a_column() -> None:
    frame, torch = _pandas(), pytest.importorskip("torch")
    for inputs, targets in (
        (X.astype(np.float32), Y),
        (torch.tensor(X, dtype=torch.float32), torch.tensor(Y)),
        (frame[["a", "b"]], frame["y"]),
        (frame[["a", "b"]], frame[["y"]]),
        *([(_polars()[["a", "b"]], _polars()["y"])] if find_spec("polars") else []),
    ):
        assert is_pair((inputs, targets))
        _same(stack((inputs, targets), "m:f"))
        flow = Flow("a/b").dataset((inputs, targets))
        assert flow.source is not None
        x, y = flow.source.dataset[5]
        assert ([float(v) for v in x], int(y)) == ([2.5, 2.75], 2)
    assert not is_pair((frame, frame)), "two tables of the same columns are for training and testing"
    assert split_of((frame, frame)) is not None


class OfAPair:
    def train_data(self) -> Any:
        frame = _pandas()
        return frame[["a", "b"]], frame["y"]

    def evaluation_data(self) -> Any:
        return None


class OfATable:
    def train_data(self) -> Any:
        return _pandas()

    def evaluation_data(self) -> Any:
        return None


def test_a_task_of_tables() -> None:
    job = parse_job({"name": "t", "task": {"target": f"{__name__}:OfAPair"}, "data": {"test_fraction": 0}}, folder=Path())
    _same(training_data(job)._data.train)  # type: ignore[attr-defined]
    flow = make_flow("train_data", {}, (), DataProvider(target=f"{__name__}:OfATable"))
    assert flow.source is not None
    assert flow.source.dataset[1]["a"] == 0.5


def test_one_column_beside_the_target_keeps_its_shape() -> None:
    tokens = [[1, 2, 3], [4, 5, 6]]
    library = pytest.importorskip("datasets")
    samples = stack(library.Dataset.from_dict({"ids": tokens, "y": [0, 1]}), "m:f", target="y")
    assert (samples.inputs.tolist(), samples.inputs.dtype) == (tokens, np.int64)
    pandas = pytest.importorskip("pandas")
    samples = stack(pandas.DataFrame({"ids": tokens, "y": [0.5, 1]}), "m:f", target="y")
    assert (samples.inputs.tolist(), samples.targets.dtype) == (tokens, np.float32)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"a": [1.0, None, 2.0]}, "column a, row 2: the value is absent"),
        ({"a": ["x", "y", "z"]}, "column a, row 1: 'x' is not a number"),
        ({"a": [1.0, 1e300, 2.0]}, r"column a, row 2: 1e\+300 is beyond float32"),
        ({"y": ["no", "yes", "no"]}, "column y, row 1: 'no' is not a number; number the classes"),
        ({"a": [1, "x", 2.5]}, "column a, row 2: 'x' is not a number"),
        ({"a": [1j, 2, 3]}, "column a, row 1: 1j is not a number"),
        ({"a": [10**400, 2, 3]}, "column a has integers beyond float32"),
        ({"a": [[1], [2, 3], [4]]}, "column a has lists of different lengths"),
        ({"a": [[1, 2], [2, 3], [4, 5]]}, "column a has lists of numbers beside other columns"),
    ],
)
@pytest.mark.parametrize("as_rows", [False, True])
def test_what_is_no_number_is_named(change: dict[str, Any], problem: str, as_rows: bool) -> None:
    columns = {"a": [1.0, 2.0, 3.0], "b": [1, 2, 3], "y": [0, 1, 0], **change}
    if as_rows:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        value: Any = rows
    else:
        value = pytest.importorskip("pandas").DataFrame(columns)
    with pytest.raises(JobError, match=f"m:f: {problem}" if not problem.startswith("m:f") else problem):
        stack(value, "m:f", target="y")


def test_what_pandas_has_and_other_libraries_do_not(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    odd = object()
    large = pandas.array([2**53 + 1, None], "Int64")
    frame = pandas.DataFrame({"a": [odd, "x"], "b": pandas.arrays.SparseArray([0.0, 2.0]), "c": large, "y": [0, 1]})
    assert as_dataset(frame, "m:f")[0] == {"a": odd, "b": 0.0, "c": 2**53 + 1, "y": 0}
    assert as_dataset(frame, "m:f")[1] == {"a": "x", "b": 2.0, "c": None, "y": 1}
    assert stack(frame[["b", "y"]], "m:f", target="y").inputs.tolist() == [0, 2]
    assert stack(pandas.DataFrame({"a": [2**70, 1], "y": [0, 1]}), "m:f", target="y").inputs.tolist() == [2.0**70, 1]
    with pytest.raises(JobError, match="column y, row 1: 18446744073709551615 is beyond int64; number the classes"):
        stack({"a": X[:2, 0], "y": np.array([2**64 - 1, 0], np.uint64)}, "m:f", target="y")
    with pytest.raises(JobError, match="make an array of each column, or choose one of them"):
        as_dataset({"a": [1.0], "y": [0]}, "m:f")
    shuffled = _pandas().iloc[::-1]
    shuffled.to_parquet(tmp_path / "shuffled.parquet")
    import pyarrow as pa

    values = [shuffled, table := pa.Table.from_pandas(shuffled), tmp_path / "shuffled.parquet", table.to_pylist()]
    for value in values:  # the last one has rows as `datasets` gives them
        assert np.array_equal(stack(value, "m:f", target="y").inputs, X[::-1].astype(np.float32))
    import ephemeron.preparation as prep

    out = str(tmp_path / "made")
    raw = prep.load_parquet(str(tmp_path / "shuffled.parquet"), out=out, label="y", label_kind="class", pool=prep.InProcess())
    assert [column.name for column in raw.schema] == ["a", "b", "y"]


def test_refusals_name_the_remedy(tmp_path: Path) -> None:
    frame = _pandas()
    with pytest.raises(JobError, match=r"m:f has rows of the columns a, b, y; name the one that is predicted: data.target_column"):
        stack(frame, "m:f")
    with pytest.raises(JobError, match="m:f has no column 'label'; it has: a, b, y"):
        stack(frame, "m:f", target="label")
    with pytest.raises(JobError, match="has 6 inputs but 2 targets"):
        Pairs(X, Y[:2], where="m:f")
    with pytest.raises(JobError, match="two columns 'a'"):
        stack(frame[["a", "a", "y"]], "m:f", target="y")
    with pytest.raises(JobError, match="columns of different lengths: a 6, b 2"):
        as_dataset({"a": X[:, 0], "b": Y[:2]}, "m:f")
    with pytest.raises(JobError, match="generator is not a map-style Dataset"):
        Flow("a/b").dataset(n for n in ())
    with pytest.raises(JobError, match=r"m:f has rows of the columns a, b, y; name the one that is predicted"):
        stack(_files(tmp_path, "csv"), "m:f")
    _files(tmp_path, "parquet")
    with pytest.raises(JobError, match=r"files of several kinds: parquet, csv; name files of one kind"):
        as_dataset(tmp_path, "m:f")
    with pytest.raises(JobError, match="does not exist or is empty"):
        as_dataset(str(tmp_path / "*.npy"), "m:f")
    with pytest.raises(JobError, match=r"no files that end in"):
        as_dataset(tmp_path / "notes.txt", "m:f")
    with pytest.raises(JobError, match="'y' is for files and functions; leave it out: digits has targets"):
        parse_job({"name": "t", "model": "m:f", "data": {"target_column": "y"}}, folder=tmp_path)
    with pytest.raises(JobError, match=r"data\.path: .*absent-\*\.csv does not exist"):
        parse_job({"name": "t", "model": "m:f", "data": {"source": "files", "path": "absent-*.csv"}}, folder=tmp_path)


def test_which_texts_are_files() -> None:
    assert all(map(is_place, ["./photos", "/data/x", "s3://bucket/x", "data/*", "data/train.csv", "me/x.Parquet"]))
    assert not any(map(is_place, ["core/mscoco", "me/photos-2.1"]))
