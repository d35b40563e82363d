from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ephemeron.data import load
from ephemeron.data.sources.readers import read_idx
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError

CODES = {"u1": 0x08, "i1": 0x09, ">i2": 0x0B, ">i4": 0x0C, ">f4": 0x0D, ">f8": 0x0E}


def idx_bytes(array: np.ndarray, dtype: str = "u1") -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, CODES[dtype], array.ndim, *array.shape) + array.astype(dtype).tobytes()


def write_mnist(folder: Path, *, train: int = 10, test: int = 0, sep: str = "-", gz: bool = False) -> None:
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        if not count:
            continue
        for kind, shape, high in (("images", (count, 4, 3), 256), ("labels", (count,), 10)):
            data = idx_bytes(rng.integers(0, high, shape))
            name = f"{part}-{kind}{sep}idx{len(shape)}-ubyte"
            (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(data) if gz else data)


def spec(path: Path | None, **options: object) -> DataSpec:
    return DataSpec(source="idx", path=path, options=options)


@pytest.mark.parametrize("sep", ["-", "."])
@pytest.mark.parametrize("gz", [False, True])
def test_mnist(tmp_path: Path, sep: str, gz: bool) -> None:
    write_mnist(tmp_path, train=10, test=4, sep=sep, gz=gz)
    data = load(spec(tmp_path), seed=0)
    assert data.train.inputs.shape == (10, 1, 4, 3)
    assert data.train.inputs.dtype == np.float32
    assert 0.5 < data.train.inputs.max() <= 1
    assert data.train.targets.dtype == np.int64
    assert data.test.inputs.shape == (4, 1, 4, 3)


def test_without_a_test_set_a_share_is_held_out(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=10)
    data = load(spec(tmp_path), seed=0)
    assert (len(data.train), len(data.test)) == (8, 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), dtype=st.sampled_from(sorted(CODES)), gz=st.booleans())
def test_every_type_and_rank(tmp_path: Path, data: st.DataObject, dtype: str, gz: bool) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
    array = data.draw(hnp.arrays(np.dtype(dtype), shape))
    path = tmp_path / ("x.gz" if gz else "x")
    path.write_bytes(gzip.compress(idx_bytes(array, dtype)) if gz else idx_bytes(array, dtype))
    back = read_idx(path)
    assert back.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(back, array)


def test_other_ranks_and_types_are_left_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx2-float").write_bytes(idx_bytes(np.full((5, 3), 2.5), ">f4"))
    (tmp_path / "train-labels-idx1-double").write_bytes(idx_bytes(np.arange(5) / 2, ">f8"))
    train = load(DataSpec(source="idx", path=tmp_path, test_fraction=0), seed=0).train
    assert train.inputs.tolist() == [[2.5] * 3] * 5
    assert train.targets.tolist() == [0, 0.5, 1, 1.5, 2]
    assert train.targets.dtype == np.float32


GOOD = idx_bytes(np.zeros((2, 4, 3)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-1], r"images-idx3-ubyte has 39 bytes, but its header states 40; fetch the file again"),
        (GOOD + b"!", r"has 41 bytes, but its header states 40"),
        (b"\x89PNG" + GOOD, r"starts with 0x89504e47, which is not an IDX magic number; give an IDX file"),
        (b"\0\0\x0a\x01" + bytes(8), r"starts with 0x00000a01"),
        (b"\0\0", r"has only 2 bytes"),
        (b"\0\0\x08\x03" + bytes(4), r"has 8 bytes but a header of 16"),
        (b"\0\0\x0e\xff" + b"\xff" * 1020, r"has 1024 bytes, but its header states \d{300}"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(JobError, match=message) as e:
        load(spec(tmp_path), seed=0)
    assert "\n" not in str(e.value)


def test_truncated_gzip(tmp_path: Path) -> None:
    write_mnist(tmp_path, gz=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(JobError, match=r"train-images-idx3-ubyte\.gz cannot be read.*fetch the file again"):
        load(spec(tmp_path), seed=0)


def test_absent_files_and_paths(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"source 'idx' needs data.path; give a folder with train-images"):
        load(spec(None), seed=0)
    with pytest.raises(JobError, match=r"nowhere' does not exist"):
        load(spec(tmp_path / "nowhere"), seed=0)
    with pytest.raises(JobError, match="has no file train-images-idx3-ubyte"):
        load(spec(tmp_path), seed=0)
    write_mnist(tmp_path, test=2)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(JobError, match="has no file t10k-labels-idx1-ubyte"):
        load(spec(tmp_path), seed=0)
    with pytest.raises(JobError, match=r"train-images-idx3-ubyte' is not a folder"):
        load(spec(tmp_path / "train-images-idx3-ubyte"), seed=0)


def test_images_and_labels_of_different_sets(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(9)))
    with pytest.raises(JobError, match=r"has shape \(10, 4, 3\) but train-labels-idx1-ubyte has \(9,\)"):
        load(spec(tmp_path), seed=0)


def test_it_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="source 'idx' takes no options, but has scale"):
        load(spec(tmp_path, scale=True), seed=0)
