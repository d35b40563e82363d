from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ephemeron.data
from ephemeron.data import Samples, load
from ephemeron.data.sources import readers
from ephemeron.data.sources.registry import hold_out
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError, MissingExtra


def test_digits() -> None:
    pytest.importorskip("sklearn")
    data = load(DataSpec(), seed=0)
    assert data.train.inputs.shape == (1438, 1, 8, 8)
    assert data.test.inputs.shape == (359, 1, 8, 8)
    assert data.train.inputs.dtype == np.float32
    assert (data.train.inputs.min(), data.train.inputs.max()) == (0, 1)
    assert data.train.targets.dtype == np.int64
    assert set(data.train.targets) == set(range(10))


def test_digits_are_those_of_scikit_learn_and_do_not_import_it() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    code = (
        "import hashlib, sys; from ephemeron.data import DataSpec, load; d = load(DataSpec(test_fraction=0.0), seed=0).train;"
        "print(hashlib.sha256(d.inputs.tobytes() + d.targets.tobytes()).hexdigest(), 'sklearn' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    images, labels = datasets.load_digits(return_X_y=True)
    expected = (images / 16).astype(np.float32).tobytes() + labels.astype(np.int64).tobytes()
    assert out == [hashlib.sha256(expected).hexdigest(), "False"]


def test_digits_of_a_scikit_learn_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    from_file = load(DataSpec(), seed=0)
    monkeypatch.setattr(readers, "_FILE", "absent.csv.gz")
    loaded = load(DataSpec(), seed=0)
    assert np.array_equal(loaded.train.inputs, from_file.train.inputs)
    assert np.array_equal(loaded.test.targets, from_file.test.targets)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    readers._table.cache_clear()  # this process may have read them
    monkeypatch.setattr(readers, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match=r"scikit-learn is not installed; run: pip install 'ephemeron\[digits\]'"):
        load(DataSpec(), seed=0)


def test_digits_takes_neither_options_nor_path(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="source 'digits' takes no options, but has size"):
        load(DataSpec(options={"size": 3}), seed=0)
    with pytest.raises(JobError, match=r"source 'digits' reads no file, but data.path = "):
        load(DataSpec(path=tmp_path), seed=0)


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("cifar", r"did you mean cifar10 or cifar100\? \(or write module:function\)"),
        ("digit", r"did you mean digits\?"),
        ("zzz", "known sources: cifar10, cifar100, digits, files, idx, npz"),
    ],
)
def test_unknown_source(source: str, remedy: str) -> None:
    with pytest.raises(JobError, match=f"data.source = '{source}' is not known; {remedy}"):
        load(DataSpec(source=source), seed=0)


def test_bad_fraction() -> None:
    with pytest.raises(JobError, match=r"DataSpec: test_fraction = 1\.0 should be from 0 to below 1"):
        load(DataSpec(test_fraction=1.0), seed=0)


@given(st.integers(1, 300), st.floats(0, 1, exclude_max=True), st.integers())
def test_hold_out_covers_exactly_and_leaves_something(count: int, fraction: float, seed: int) -> None:
    data = hold_out(Samples(np.zeros((count, 2)), np.arange(count)), fraction, seed=seed)
    assert len(data.train) >= 1
    assert abs(len(data.test) - count * fraction) <= 1
    assert sorted([*data.train.targets, *data.test.targets]) == list(range(count))


def test_hold_out_depends_on_the_seed_only() -> None:
    samples = Samples(np.zeros((50, 2)), np.arange(50))
    a, b, c = (hold_out(samples, 0.2, seed=s).test.targets.tolist() for s in (1, 1, 2))
    assert a == b != c


def test_hold_out_of_nothing() -> None:
    data = hold_out(Samples(np.zeros((5, 2)), np.arange(5)), 0, seed=0)
    assert data.test.inputs.shape == (0, 2)


def npz(path: Path, **options: object) -> ephemeron.data.DataSets:
    return load(DataSpec(source="npz", path=path, options=options), seed=0)


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    x = np.arange(20.0).reshape(10, 2)
    np.savez(path, x=x, y=np.arange(10), a=x[:3], b=np.arange(3))
    data = npz(path)
    assert (len(data.train), len(data.test)) == (8, 2)
    assert data.train.inputs.dtype == np.float64
    data = npz(path, test_inputs="a", test_targets="b")
    assert (len(data.train), len(data.test)) == (10, 3)
    np.testing.assert_array_equal(data.train.inputs, x)
    assert npz(path, inputs="a", targets="b").train.inputs.shape == (2, 2)


def test_npz_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, images=np.zeros((3, 2)), y=np.zeros(3), odd=np.zeros((3, 5)), short=np.zeros(2), empty=np.zeros((0, 2)))
    with pytest.raises(JobError, match=r"d\.npz has no array 'x', only empty, images, odd, short, y; set data\.options\.inputs"):
        npz(path)
    with pytest.raises(JobError, match=r"data\.options\.test_targets is missing"):
        npz(path, inputs="images", test_inputs="images")
    with pytest.raises(JobError, match=r"data\.options: unknown key input; did you mean inputs\?"):
        npz(path, input="images")
    with pytest.raises(JobError, match=r"data\.options: inputs = 3 should be text"):
        npz(path, inputs=3)
    with pytest.raises(JobError, match="3 inputs but 2 targets"):
        npz(path, inputs="images", targets="short")
    with pytest.raises(JobError, match=r"inputs have shape \(2,\) for training but \(5,\) for testing"):
        npz(path, inputs="images", test_inputs="odd", test_targets="y")
    with pytest.raises(JobError, match="source 'npz' has no training samples"):
        npz(path, inputs="empty", targets="empty")
    with pytest.raises(JobError, match=r"source 'npz' needs data.path; give an .npz file"):
        load(DataSpec(source="npz"), seed=0)


def test_npz_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, x=np.array([None, {}]), y=np.zeros(2))
    with pytest.raises(JobError, match=r"d\.npz cannot be read: Object arrays cannot be loaded"):
        npz(path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(JobError, match=r"d\.npz cannot be read"):
        npz(path)
    path.write_text("x,y")
    with pytest.raises(JobError, match=r"d\.npz cannot be read"):
        npz(path)
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(JobError, match=r"single\.npy holds a single array"):
        npz(tmp_path / "single.npy")


def test_importing_is_free() -> None:
    code = "import sys, ephemeron.data; print([m for m in ('torch', 'sklearn', 'tarfile') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_facade_is_sorted_and_complete() -> None:
    assert ephemeron.data.__all__ == sorted(ephemeron.data.__all__)
    assert all(hasattr(ephemeron.data, name) for name in ephemeron.data.__all__)


def test_prepared_datasets_with_numeric_columns(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")
    from ephemeron.data.tables import Column, TableWriter

    columns = (Column(name="y", kind="label", dtype="float32"), Column(name="a", kind="numeric", dtype="float64"))

    def write(folder, values):
        writer = TableWriter(str(folder), columns)
        table = pa.table({"y": pa.array([n % 2 for n in range(len(values))], pa.float32()), "a": pa.array(values, pa.float64())})
        writer.finish("d", [writer.write(0, table)])

    write(tmp_path / "train", [1.0, 2.0, 3.0])
    write(tmp_path / "test", [4.0])
    write(tmp_path / "gap", [1.0, None])
    found = load(DataSpec(source="prepared", path=tmp_path), seed=0)
    assert found.train.inputs.tolist() == [[1.0], [2.0], [3.0]]
    assert found.train.targets.tolist() == [0, 1, 0]
    assert found.test.inputs.tolist() == [[4.0]]
    with pytest.raises(JobError, match="gap has absent values"):
        load(DataSpec(source="prepared", path=tmp_path / "gap"), seed=0)
    write(tmp_path / "wide", [1.0, 1e39])
    with pytest.raises(JobError, match=r"wide: column a, row 2: 1e\+39 is beyond float32; scale the column"):
        load(DataSpec(source="prepared", path=tmp_path / "wide"), seed=0)
    with pytest.raises(JobError, match="none' does not exist"):
        load(DataSpec(source="prepared", path=tmp_path / "none"), seed=0)


def test_prepared_columns_are_a_tensor_or_a_dict(tmp_path):
    pytest.importorskip("pyarrow", reason="prepared datasets are Arrow files")
    torch = pytest.importorskip("torch", reason="batches are tensors")
    from ephemeron.data.tables import Column, TableWriter
    from ephemeron.preparation.columns import to_table
    from ephemeron.training.task.tensors import as_tensors

    y = Column(name="y", kind="label", dtype="int32")
    age = Column(name="age", kind="numeric", dtype="float64")
    plan = Column(name="plan", kind="vector", dtype="float32", width=2)
    city = Column(name="city", kind="ordinal", dtype="int32", width=4)
    rows = {"y": np.array([0, 2]), "age": np.array([0.5, 7]), "plan": np.eye(2, dtype="f4"), "city": np.array([3, 0])}

    def write(name, *columns):
        writer = TableWriter(str(tmp_path / name), columns)
        writer.finish("d", [writer.write(0, to_table(rows, columns))])
        return DataSpec(source="prepared", path=tmp_path / name, test_fraction=0.0, options={"batch": "dict"} if "dict" in name else {})

    assert load(write("tensor", y, age, plan), seed=0).train.inputs.tolist() == [[0.5, 1, 0], [7, 0, 1]]
    samples = load(write("dict", y, age, plan, city), seed=0).train
    batch = as_tensors(samples.inputs, torch.float32)
    assert samples.targets.tolist() == [0, 2]
    assert {name: (value.dtype, value.tolist()) for name, value in batch.items()} == {
        "age": (torch.float32, [0.5, 7.0]),
        "plan": (torch.float32, [[1.0, 0.0], [0.0, 1.0]]),
        "city": (torch.int64, [3, 0]),
    }
    with pytest.raises(JobError, match=r'column city has codes, which are no numbers; set data\.options\.batch = "dict", or use one_hot'):
        load(write("codes", y, age, city), seed=0)
    with pytest.raises(JobError, match="batch = 'list' is not known; use one of tensor, dict"):
        load(DataSpec(source="prepared", path=tmp_path / "tensor", options={"batch": "list"}), seed=0)
