from __future__ import annotations

import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ephemeron.data import load
from ephemeron.data.formats.cifar import load_plain
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError, PickleRefused

RNG = np.random.default_rng(0)
PER_FILE = 3


def pixels() -> np.ndarray:
    return RNG.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)


def py2_pickle(table: dict[str, object]) -> bytes:
    """What Python 2's cPickle wrote, protocol 2: text as SHORT_BINSTRING/BINSTRING, names of numpy 1."""

    def put(value: object) -> bytes:
        if isinstance(value, (str, bytes)):
            raw = value.encode("latin1") if isinstance(value, str) else value
            return b"T" + struct.pack("<i", len(raw)) + raw
        if isinstance(value, bool):
            return b"\x88" if value else b"\x89"
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        if value is None:
            return b"N"
        if isinstance(value, tuple):
            return b"(" + b"".join(map(put, value)) + b"t"
        if isinstance(value, list):
            return b"](" + b"".join(map(put, value)) + b"e"
        if isinstance(value, np.ndarray):
            dtype = b"cnumpy\ndtype\n" + put(("u1", 0, 1)) + b"R" + put((3, "|", None, None, None, -1, -1, 0)) + b"b"
            made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + put((0,)) + put("b") + b"tR"
            return made + b"(" + put(1) + put(value.shape) + dtype + put(False) + put(value.tobytes()) + b"tb"
        raise TypeError(value)

    return b"\x80\x02}(" + b"".join(put(k) + put(v) for k, v in table.items()) + b"u."


def py3_pickle(protocol: int):
    return lambda table: pickle.dumps(table, protocol=protocol)


def cifar10(form: str, dump=py2_pickle) -> dict[str, bytes]:
    """Files of a tiny CIFAR-10 by path; label i of every file is i."""
    labels = list(range(PER_FILE))
    if form == "binary":
        rows = [np.column_stack([np.array(labels, np.uint8), pixels()]).tobytes() for _ in range(6)]
        names = [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)]
        return dict(zip([*names, "cifar-10-batches-bin/test_batch.bin"], rows, strict=True))
    names = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)]
    tables = [{"batch_label": "b", "labels": labels, "data": pixels(), "filenames": ["a.png"]} for _ in range(6)]
    return {n: dump(t) for n, t in zip([*names, "cifar-10-batches-py/test_batch"], tables, strict=True)}


def cifar100(form: str, dump=py2_pickle) -> dict[str, bytes]:
    coarse, fine = [1, 19, 0], [99, 42, 7]
    if form == "binary":
        heads = np.array([coarse, fine], np.uint8).T
        return {f"cifar-100-binary/{n}.bin": np.column_stack([heads, pixels()]).tobytes() for n in ("train", "test")}
    return {f"cifar-100-python/{n}": dump({"data": pixels(), "fine_labels": fine, "coarse_labels": coarse}) for n in ("train", "test")}


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return (root / name).parent


def write_tar(path: Path, files: dict[str, bytes], *more: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for entry in more:
            archive.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def read(source: str, path: Path | None, **options: object):
    return load(DataSpec(source=source, path=path, options=options), seed=0)


@pytest.mark.parametrize("where", ["folder", "parent", "archive"])
@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar10(tmp_path: Path, form: str, where: str) -> None:
    files = cifar10(form)
    inner = write_folder(tmp_path, files)
    path = {"folder": inner, "parent": tmp_path, "archive": tmp_path / "c.tar.gz"}[where]
    if where == "archive":
        write_tar(path, files)
    data = read("cifar10", path, normalise=False)
    assert data.train.inputs.shape == (15, 3, 32, 32)
    assert data.train.inputs.dtype == np.float32
    assert data.train.targets.tolist() == [0, 1, 2] * 5
    assert data.test.targets.dtype == np.int64
    assert len(data.test) == 3
    assert data.train.inputs.max() == 1


def test_both_forms_put_the_same_bytes_in_the_same_place(tmp_path: Path) -> None:
    image = pixels()
    labels = [3, 1, 4]
    binary = np.column_stack([np.array(labels, np.uint8), image]).tobytes()
    pickled = py2_pickle({"labels": labels, "data": image})
    first = write_folder(tmp_path, dict.fromkeys(cifar10("binary"), binary))
    second = write_folder(tmp_path, dict.fromkeys(cifar10("python"), pickled))
    a, b = read("cifar10", first), read("cifar10", second)
    np.testing.assert_array_equal(a.train.inputs, b.train.inputs)
    np.testing.assert_array_equal(a.test.targets, b.test.targets)
    c = read("cifar10", first, normalise=False)
    assert c.test.inputs[2, 1, 5, 7] == np.float32(image[2, 1024 + 5 * 32 + 7]) / np.float32(255)


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_python_3_are_read_too(tmp_path: Path, protocol: int) -> None:
    folder = write_folder(tmp_path, cifar10("python", py3_pickle(protocol)))
    assert read("cifar10", folder).train.targets.tolist() == [0, 1, 2] * 5


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar100_labels(tmp_path: Path, form: str) -> None:
    archive = write_tar(tmp_path / "c.tar.gz", cifar100(form))
    assert read("cifar100", archive).train.targets.tolist() == [99, 42, 7]
    assert read("cifar100", archive, labels="coarse").test.targets.tolist() == [1, 19, 0]
    with pytest.raises(JobError, match=r"data\.options\.labels = 'rough' is not known; use one of coarse, fine"):
        read("cifar100", archive, labels="rough")


def test_normalised_by_the_training_set(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, cifar10("binary"))
    plain, normal = read("cifar10", folder, normalise=False), read("cifar10", folder)
    np.testing.assert_allclose(normal.train.inputs.mean(axis=(0, 2, 3)), 0, atol=1e-4)
    np.testing.assert_allclose(normal.train.inputs.std(axis=(0, 2, 3)), 1, atol=1e-4)
    mean, std = (getattr(plain.train.inputs.astype(float), f)(axis=(0, 2, 3)).reshape(3, 1, 1) for f in ("mean", "std"))
    np.testing.assert_allclose(normal.test.inputs, (plain.test.inputs - mean) / std, atol=1e-4)


def test_constant_channel_does_not_divide_by_zero(tmp_path: Path) -> None:
    files = {name: bytes(3073 * 2) for name in cifar10("binary")}
    assert np.isfinite(read("cifar10", write_folder(tmp_path, files)).train.inputs).all()


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("archived", [False, True])
def test_a_malicious_pickle_runs_nothing(tmp_path: Path, monkeypatch, protocol: int, archived: bool) -> None:
    target = tmp_path / "owned"
    monkeypatch.setenv("EVIL", str(target))
    files = cifar10("python")
    files["cifar-10-batches-py/data_batch_3"] = pickle.dumps({"data": Evil()}, protocol=protocol)
    path = write_tar(tmp_path / "c.tar.gz", files) if archived else write_folder(tmp_path, files)
    with pytest.raises(JobError, match=r"data_batch_3 is not a pickled CIFAR batch: it asks for posix\.mkdir"):
        read("cifar10", path)
    assert not target.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cbuiltins\neval\n(V1+1\ntR.", "asks for builtins.eval"),
        (b"cnumpy\nload\n.", "asks for numpy.load"),
        (b"cnumpy.core.multiarray\nscalar\n.", "asks for numpy.core.multiarray.scalar"),
        (b"cnumpy\nndarray\n(I1\ntR.", "calls numpy.ndarray"),
        (b"cnumpy\ndtype\n(VO8\ntR.", "dtype 'O8' is not one of numbers"),
        (b"c_codecs\nencode\n(Vx\nVzip\ntR.", "calls _codecs.encode"),
        (b"Ppersistent\n.", "UnpicklingError"),
        (b"", "EOFError"),
        (b"\x80\x02}", "EOFError"),
    ],
)
def test_what_the_reader_refuses(data: bytes, message: str) -> None:
    with pytest.raises(PickleRefused, match=message):
        load_plain(data)


def test_arrays_of_objects_and_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(PickleRefused, match="dtype 'O8'"):
        load_plain(pickle.dumps(np.array([None])))
    data = py2_pickle({"data": np.zeros((2, 2), np.uint8)})
    with pytest.raises(PickleRefused, match=r"array of shape \(2, 3\) and dtype uint8 has 4 bytes"):
        load_plain(data.replace(b"(J\x02\0\0\0J\x02\0\0\0t", b"(J\x02\0\0\0J\x03\0\0\0t"))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", range(6))
def test_plain_arrays_survive(order, protocol: int) -> None:
    array = np.asarray(np.arange(6, dtype=">i2").reshape(2, 3), order=order)
    np.testing.assert_array_equal(load_plain(pickle.dumps(array, protocol=protocol)).array, array)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"data": np.zeros((3, 3072), np.uint8)}, "lacks 'data' or 'labels'; it has data"),
        ({"data": [1], "labels": [1]}, "lacks 'data' or 'labels'"),
        ({"data": np.zeros((3, 9), np.uint8), "labels": [1, 2, 3]}, r"'data' is uint8 \(3, 9\), not uint8 \(3, 3072\)"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["x"]}, "'labels' are not all whole numbers"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "data_batch_1 has label 10 at record 0, but there are 10"),
    ],
)
def test_odd_tables_are_named(tmp_path: Path, table: dict[str, object], message: str) -> None:
    files = cifar10("python")
    files["cifar-10-batches-py/data_batch_1"] = py2_pickle(table)
    with pytest.raises(JobError, match=message):
        read("cifar10", write_folder(tmp_path, files))


def test_truncated_records(tmp_path: Path) -> None:
    files = cifar10("binary")
    files["cifar-10-batches-bin/data_batch_2.bin"] = bytes(100)
    with pytest.raises(JobError, match=r"data_batch_2\.bin has 100 bytes, not a multiple of 3073; fetch"):
        read("cifar10", write_folder(tmp_path, files))


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, cifar10("binary"))
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(JobError, match=r"cifar-10-batches-bin has no data_batch_4\.bin; fetch"):
        read("cifar10", folder)


def test_wrong_places(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"source 'cifar10' needs data.path"):
        read("cifar10", None)
    with pytest.raises(JobError, match=r"has no data_batch_1\.bin \(cifar-10-batches-bin\) or data_batch_1 "):
        read("cifar10", tmp_path)
    with pytest.raises(JobError, match=r"c\.tar\.gz has no train\.bin \(cifar-100-binary\) or train"):
        read("cifar100", write_tar(tmp_path / "c.tar.gz", cifar10("binary")))
    with pytest.raises(JobError, match=r"data\.options: unknown key labels; known keys: normalise"):
        read("cifar10", tmp_path, labels="fine")
    with pytest.raises(JobError, match=r"data\.options: normalise = 'yes' should be true or false"):
        read("cifar10", tmp_path, normalise="yes")


def test_links_in_an_archive_are_not_followed_and_nothing_is_written(tmp_path: Path) -> None:
    files = cifar100("binary")
    secret = tmp_path / "secret"
    secret.write_bytes(files.pop("cifar-100-binary/test.bin"))
    link = tarfile.TarInfo("cifar-100-binary/test.bin")
    link.type, link.linkname = tarfile.SYMTYPE, str(secret)
    files["../../escaped/train.bin"] = files.pop("cifar-100-binary/train.bin")
    archive = write_tar(tmp_path / "c.tar.gz", files, link)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(JobError, match=r"has no test\.bin"):
        read("cifar100", archive)
    assert sorted(tmp_path.rglob("*")) == before


def test_damaged_archives(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "c.tar.gz", cifar10("binary"))
    whole = archive.read_bytes()
    for data in (whole[: len(whole) // 2], b"no archive", b""):
        archive.write_bytes(data)
        with pytest.raises(JobError, match=r"c\.tar\.gz is not a valid tar archive.*fetch the archive again") as e:
            read("cifar10", archive)
        assert "\n" not in str(e.value)


def test_a_flipped_pixel_in_an_archive_is_noticed(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "c.tar.gz", cifar100("binary"))
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    with pytest.raises(JobError, match=r"c\.tar\.gz is not a valid tar archive: (CRC check failed|Error -3)"):
        read("cifar100", archive)


def test_a_member_that_is_there_twice(tmp_path: Path) -> None:
    files = cifar100("binary")
    files["other/train.bin"] = files["cifar-100-binary/train.bin"]
    with pytest.raises(JobError, match=r"second or oversized other/train.bin"):
        read("cifar100", write_tar(tmp_path / "c.tar.gz", files))
