"""Importers: what each makes of a small data set, from folders, archives and stores, and what each refuses."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalog_worlds import overwrite, put
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore
from test_cifar import cifar10, cifar100, py2_pickle, write_folder
from test_idx import idx_bytes, write_mnist

from ephemeron.cli import data as cli
from ephemeron.data import load
from ephemeron.data.catalog import Audio, Dataset, DatasetReader, DatasetStore
from ephemeron.data.catalog.check import check_variant
from ephemeron.data.catalog.files import FileRange, Files
from ephemeron.data.catalog.importers import KINDS, import_dataset
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.objects import ObjectFiles
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.catalog.unpack import DECODERS
from ephemeron.data.spec import DataSpec
from ephemeron.errors import DatasetDamaged, JobError

RNG = np.random.default_rng(0)


def describe(
    store: DatasetStore,
    kind: str,
    source: Path | str,
    variant: str | None = None,
    *,
    digests: bool = True,
    on_defect: str = "fail",
    **options: str,
) -> Dataset:
    return import_dataset(kind, source, "me/x", store, variant=variant, options=options, shard_size=4, digests=digests, on_defect=on_defect)


def reader(store: DatasetStore, variant: str = "train") -> DatasetReader:
    """Opens what was imported, having checked it whole."""
    dataset = store.dataset("me/x")
    assert check_variant(store, dataset, variant, decode=None).defects == ()
    return DatasetReader(store.files, dataset, variant)


def pixels(height: int = 5, width: int = 4) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(array: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    out = io.BytesIO()
    image.fromarray(array).save(out, "png")
    return out.getvalue()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def zipped(path: Path, files: dict[str, bytes], method: int) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def pictures() -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    """Six images in three classes, as files and as arrays."""
    arrays = {f"{c}/{sub}{i}.png": pixels() for c, sub in (("dog", ""), ("cat", "deep/"), ("ant", "")) for i in range(2)}
    return {name: png(array) for name, array in arrays.items()}, arrays


PLACES: dict[str, Callable[[Path, dict[str, bytes]], Path]] = {
    "folder": lambda at, files: write(at / "pictures", files),
    "tar": lambda at, files: tar(at / "pictures.tar", files),
    "stored zip": lambda at, files: zipped(at / "pictures.zip", files, zipfile.ZIP_STORED),
    "deflated zip": lambda at, files: zipped(at / "pictures.zip", files, zipfile.ZIP_DEFLATED),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_of_images(store: DatasetStore, tmp_path: Path, pictures, place: str) -> None:
    files, arrays = pictures
    extra = {"cat/notes.txt": b"x", ".DS_Store": b"x", "dog/._0.png": b"x", "__MACOSX/dog/0.png": b"x"}
    made = describe(store, "images", PLACES[place](tmp_path, {**files, **extra}))
    assert made.variants["train"].info == {"classes": ["ant", "cat", "dog"], "passed_over": 1}
    samples = list(reader(store))
    assert [(s.key, s.target) for s in samples] == [(k, "acd".index(k[0])) for k in sorted(arrays)]
    for sample in samples:
        np.testing.assert_array_equal(sample.value, arrays[sample.key])
    stored = list(run(store.files.tree("")))
    assert not [path for path in stored if "/data/" in path], "nothing is copied"


def test_a_folder_of_images_in_any_store(any_store: DatasetStore, files: Files, pictures) -> None:
    """The data lies in the dataset's own folder; the source is named by path, where the store has a URL to open."""
    contents, arrays = pictures
    if isinstance(files, ObjectFiles) and files.url.startswith("memory"):
        pytest.skip("obstore's MemoryStore has no URL by which a source could be named")
    for name, content in contents.items():
        put(files, f"datasets/me/x/data/train/{name}", content)
    made = describe(any_store, "images", f"{files.url}/datasets/me/x/data/train")
    assert made.variants["train"].root is None, "what lies in its own folder moves with it"
    for sample in reader(any_store):
        np.testing.assert_array_equal(sample.value, arrays[sample.key])


def test_metadata_may_go_to_a_store_that_has_no_url(tmp_path: Path, pictures) -> None:
    store = DatasetStore(ObjectFiles(MemoryStore(), url="memory://test"))
    describe(store, "images", write(tmp_path / "p", pictures[0]))
    assert [s.target for s in reader(store)] == [0, 0, 1, 1, 2, 2]


def test_copying_keeps_the_layout_and_resumes(store: DatasetStore, tmp_path: Path, pictures) -> None:
    files, arrays = pictures
    source = write(tmp_path / "train2017", files)
    told: list[tuple[str, int, int | None]] = []
    how = {"copy": True, "tell": lambda *args: told.append(args)}
    made = import_dataset("images", str(source), "me/x", store, **how)  # type: ignore[arg-type]
    assert made.variants["train"].root is None
    for path in source.rglob("*.png"):
        path.unlink()
    samples = list(reader(store))
    assert len(samples) == 6
    assert all((s.value == arrays[s.key]).all() for s in samples)
    assert reader(store).metas([0])[0].data["image"].path == "train2017/ant/0.png"
    assert told == [("copying", 6, 6), ("train", 6, 6)]
    write(source, files)
    import_dataset("images", str(source), "me/x", store, **how)  # type: ignore[arg-type]
    write(source, {"cat/deep/0.png": files["dog/0.png"]})
    with pytest.raises(JobError, match=r"data/train2017/cat/deep/0\.png exists and differs from .*; rename"):
        import_dataset("images", str(source), "me/x", store, **how)  # type: ignore[arg-type]


def test_copying_from_a_bucket_is_refused(store: DatasetStore, s3: str) -> None:
    put(open_files(f"{s3}/src"), "a/1.png", b"x")
    with pytest.raises(JobError, match="is not on this machine, and only local files are copied; leave --copy out"):
        import_dataset("images", f"{s3}/src", "me/x", store, copy=True)


def test_progress_is_told_for_long_work(store: DatasetStore, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2500, 1)), y=np.zeros(2500))
    told: list[tuple[str, int, int | None]] = []
    import_dataset("npz", str(tmp_path / "a.npz"), "me/x", store, tell=lambda *args: told.append(args))
    assert told == [("train", 1000, 2500), ("train", 2000, 2500), ("train", 2500, 2500)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.png": b"x"}, "a.png is outside of a folder that names its class; one folder per class"),
        ({"cat/a.txt": b"x"}, "has no images; looked for .jpg"),
        ({"cat/a.png": b"", "cat/b.png": b"x"}, "cat/a.png is empty; fetch it again"),
        ({".hidden/a.png": b"x"}, "has no files in it"),
        (
            {"train/cat/a.png": b"x", "val/cat/b.png": b"x"},
            r"has splits \(train, val\) where classes should be; import .*/p/train with --variant train",
        ),
    ],
)
def test_folders_that_are_no_images(store: DatasetStore, tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(JobError, match=message):
        describe(store, "images", write(tmp_path / "p", files))
    assert store.names() == []


def test_sources_that_are_none(store: DatasetStore, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="does not exist or is empty; give a folder, an archive, a file or a URL"):
        describe(store, "images", tmp_path / "nowhere")
    for name in ("x.tar.gz", "x.tgz"):
        tar(tmp_path / name, {"a/1.png": b"x"}, "w:gz")
        with pytest.raises(JobError, match="is a compressed tar, which has no random access; unpack it"):
            describe(store, "images", tmp_path / name)
    for name in ("y.tar", "y.zip"):
        (tmp_path / name).write_bytes(b"no archive at all" * 100)
        with pytest.raises(JobError, match=rf"{name} is not a valid archive"):
            describe(store, "images", tmp_path / name)
    zipped(tmp_path / "z.zip", {"a/1.png": b"x"}, zipfile.ZIP_BZIP2)
    with pytest.raises(JobError, match=r"unusually compressed member a/1\.png; unpack it"):
        describe(store, "images", tmp_path / "z.zip")
    with pytest.raises(JobError, match="import kind 'image' is not known; did you mean images"):
        describe(store, "image", tmp_path)
    with pytest.raises(JobError, match="import kind 'npz' has no option 'input'; did you mean inputs"):
        describe(store, "npz", tmp_path / "y.zip", input="z")


def test_a_truncated_tar(store: DatasetStore, tmp_path: Path, pictures) -> None:
    path = tar(tmp_path / "p.tar", pictures[0])
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        last = max(member.offset_data for member in archive)
    path.write_bytes(whole[: last + 10])
    with pytest.raises(JobError, match=r"p\.tar (ends within its member|is not a valid archive)"):
        describe(store, "images", path)
    assert store.names() == []


class TestCoco:
    def table(self, **changes: object) -> dict[str, object]:
        good: dict[str, object] = {
            "images": [{"id": 9, "file_name": "9.png"}, {"id": 2, "file_name": "2.png"}, {"id": 5, "file_name": "5.png"}],
            "annotations": [
                {"id": 1, "image_id": 9, "bbox": [0, 1, 2, 3.5], "category_id": 90, "iscrowd": 0, "segmentation": [[1]]},
                {"id": 2, "image_id": 9, "bbox": [4, 5, 6, 7], "category_id": 1, "iscrowd": 1},
                {"id": 3, "image_id": 2, "bbox": [1, 1, 1, 1], "category_id": 17},
            ],
            "categories": [{"id": 90, "name": "brush"}, {"id": 1, "name": "person"}, {"id": 17, "name": "cat"}],
        }
        return {**good, **changes}

    def images(self, tmp_path: Path, *names: str) -> Path:
        return write(tmp_path / "images", {name: png(pixels()) for name in names or ("2.png", "5.png", "9.png")})

    @pytest.mark.parametrize("inside", [True, False])
    def test_boxes(self, store: DatasetStore, tmp_path: Path, inside: bool) -> None:
        folder = self.images(tmp_path)
        notes = (folder if inside else tmp_path) / "instances.json"
        notes.write_text(json.dumps(self.table()))
        made = describe(store, "coco", folder, annotations="instances.json" if inside else str(notes))
        names = [c["name"] for c in made.variants["train"].info["categories"]]
        assert names == ["person", "cat", "brush"]
        two, five, nine = reader(store)
        assert (two.key, two.value.shape) == ("2.png", (5, 4, 3))
        assert two.target == {"image_id": 2, "boxes": [[1.0, 1.0, 1.0, 1.0]], "labels": [1], "iscrowd": [0]}
        assert five.target == {"image_id": 5, "boxes": [], "labels": [], "iscrowd": []}
        assert nine.target["boxes"] == [[0, 1, 2, 3.5], [4, 5, 6, 7]]
        assert (nine.target["labels"], nine.target["iscrowd"]) == ([2, 0], [0, 1])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"images": None}, "is not a COCO annotation file"),
            ({"categories": []}, "is not a COCO annotation file: 90 is missing or unknown"),
            ({"annotations": [{"image_id": 3}]}, "3 is missing or unknown"),
            ({"annotations": [{"image_id": 9, "bbox": [1, 2], "category_id": 1}]}, "has a box of 2 numbers"),
            ({"images": [{"id": 1, "file_name": "1.png"}], "annotations": []}, "has no 1.png, which .* lists; give"),
            (
                {"images": [{"id": 9, "file_name": "9.png"}, {"id": 9, "file_name": "2.png"}]},
                "has two images of id 9: 2.png and 9.png; give each an id of its own",
            ),
            (
                {"categories": [{"id": i, "name": name} for i, name in ((90, "brush"), (1, "person"), (1, "cat"))]},
                "has two categories of id 1: cat and person",
            ),
        ],
    )
    def test_annotations_that_are_none(self, store, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        folder = self.images(tmp_path)
        (tmp_path / "i.json").write_text(json.dumps(self.table(**changes)))
        with pytest.raises(JobError, match=message):
            describe(store, "coco", folder, annotations=str(tmp_path / "i.json"))

    def test_no_annotations(self, store: DatasetStore, tmp_path: Path) -> None:
        folder = self.images(tmp_path)
        with pytest.raises(JobError, match="needs the option annotations; -o annotations="):
            describe(store, "coco", folder)
        with pytest.raises(JobError, match="does not exist"):
            describe(store, "coco", folder, annotations=str(tmp_path / "nowhere.json"))
        (tmp_path / "x.json").write_text("{")
        with pytest.raises(JobError, match=r"x\.json is not JSON"):
            describe(store, "coco", folder, annotations=str(tmp_path / "x.json"))


@pytest.mark.parametrize(("kind", "fmt"), [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.uint16, "PPM"), (np.float32, "TIFF")])
def test_images_of_more_than_8_bits_keep_their_values(store: DatasetStore, tmp_path: Path, kind: Any, fmt: str) -> None:
    from PIL import Image

    grey, data = np.array([[0, 255, 256], [1000, 40000, 65535]], kind), io.BytesIO()
    Image.fromarray(grey).save(data, fmt)
    folder = write(tmp_path / "images", {f"a/1.{fmt.lower()}": data.getvalue()})
    describe(store, "images", folder)
    (found,) = reader(store)
    assert found.value.dtype == kind
    assert np.array_equal(found.value, np.repeat(grey[..., None], 3, axis=2))
    assert np.array_equal(DECODERS["image"](data.getvalue(), {"mode": "L"}), grey)
    with pytest.raises(ValueError, match="which CMYK cuts off"):
        DECODERS["image"](data.getvalue(), {"mode": "CMYK"})


class TestLibriSpeech:
    def files(self, suffix: str) -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
        soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed")
        waves: dict[str, np.ndarray] = {}
        files: dict[str, bytes] = {}
        for speaker, chapter, count in ((84, 121123, 2), (84, 121550, 1), (1272, 128104, 2)):
            lines = []
            for i in range(count):
                name = f"{speaker}-{chapter}-{i:04d}"
                waves[name] = RNG.uniform(-0.5, 0.5, 160 + i).astype(np.float32)
                out = io.BytesIO()
                soundfile.write(out, waves[name], 16000, format=suffix.upper(), subtype="PCM_16")
                files[f"LibriSpeech/dev-clean/{speaker}/{chapter}/{name}.{suffix}"] = out.getvalue()
                lines.append(f"{name} SAID NUMBER {i}\n")
            files[f"LibriSpeech/dev-clean/{speaker}/{chapter}/{speaker}-{chapter}.trans.txt"] = "".join(lines).encode()
        return files, waves

    @pytest.mark.parametrize("suffix", ["flac", "wav"])
    @pytest.mark.parametrize("place", ["folder", "tar"])
    def test_utterances(self, store: DatasetStore, tmp_path: Path, suffix: str, place: str) -> None:
        files, waves = self.files(suffix)
        describe(store, "librispeech", PLACES[place](tmp_path, files), variant="dev-clean")
        samples = list(reader(store, "dev-clean"))
        assert sorted(s.key for s in samples) == sorted(waves)
        for sample in samples:
            assert isinstance(sample.value, Audio)
            assert (sample.value.rate_hz, sample.value.samples.dtype) == (16000, np.float32)
            np.testing.assert_allclose(sample.value.samples, waves[sample.key], atol=1 / 32768)
            assert sample.target == f"SAID NUMBER {int(sample.key[-1])}"
            speaker, chapter, _ = sample.key.split("-")
            assert sample.extra == {"speaker": speaker, "chapter": chapter}

    def test_what_does_not_fit_together(self, store: DatasetStore, tmp_path: Path) -> None:
        files, _ = self.files("flac")
        at = "LibriSpeech/dev-clean/84/121123/84-121123"
        source = write(tmp_path / "a", files)
        (source / f"{at}-0001.flac").unlink()
        with pytest.raises(JobError, match=r"84-121123\.trans\.txt has no audio for utterance '84-121123-0001'"):
            describe(store, "librispeech", source)
        source = write(tmp_path / "b", {**files, f"{at}-0007.flac": b"x"})
        with pytest.raises(JobError, match=r"84-121123-0007\.flac has no transcript"):
            describe(store, "librispeech", source)
        source = write(tmp_path / "c", {**files, f"{at}.trans.txt": b"84-121123-0000  \n"})
        with pytest.raises(JobError, match="has no text for utterance '84-121123-0000'"):
            describe(store, "librispeech", source)
        source = write(tmp_path / "d", {**files, f"{at}.trans.txt": b"84-121123-0000 \xff\n"})
        with pytest.raises(JobError, match=r"84-121123\.trans\.txt, line 1 is not UTF-8"):
            describe(store, "librispeech", source)
        with pytest.raises(JobError, match="has no transcripts"):
            describe(store, "librispeech", write(tmp_path / "e", {"x.flac": b"x"}))


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize(("kind", "make"), [("cifar10", cifar10), ("cifar100", cifar100)])
@pytest.mark.parametrize("place", ["folder", "tar"])
def test_cifar_is_what_the_jobs_source_reads(store, tmp_path: Path, form: str, kind: str, make, place: str) -> None:
    files = make(form)
    path = write_folder(tmp_path / "files", files)
    made = describe(store, kind, path if place == "folder" else tar(tmp_path / "c.tar", files))
    expected = load(DataSpec(source=kind, path=path, options={"normalise": False}), seed=0)
    assert sorted(made.variants) == ["test", "train"]
    for variant, samples in (("train", expected.train), ("test", expected.test)):
        got = reader(store, variant)
        np.testing.assert_array_equal(np.stack([s.value for s in got]).astype(np.float32) / 255, samples.inputs)
        assert [s.target for s in got] == samples.targets.tolist()


def test_cifar100_coarse_labels_and_one_split(store: DatasetStore, tmp_path: Path) -> None:
    path = write_folder(tmp_path, cifar100("binary"))
    assert list(describe(store, "cifar100", path, variant="test", labels="coarse").variants) == ["test"]
    assert [s.target for s in reader(store, "test")] == [1, 19, 0]
    with pytest.raises(JobError, match="labels = 'rough' is not known; use one of coarse, fine"):
        describe(store, "cifar100", path, labels="rough")
    with pytest.raises(JobError, match="has no 'val'; it has train, test"):
        describe(store, "cifar100", path, variant="val")


def test_cifar_that_is_none(store: DatasetStore, tmp_path: Path) -> None:
    files = cifar10("binary")
    folder = write_folder(tmp_path / "a", files)
    (folder / "data_batch_4.bin").write_bytes(bytes(100))
    with pytest.raises(JobError, match=r"data_batch_4\.bin has 100 bytes, not a multiple of 3073; fetch"):
        describe(store, "cifar10", folder)
    (folder / "data_batch_4.bin").unlink()
    with pytest.raises(JobError, match=r"has no data_batch_4\.bin; fetch"):
        describe(store, "cifar10", folder)
    with pytest.raises(JobError, match=r"is not cifar100; give the unpacked folder cifar-100-binary or cifar-100-python"):
        describe(store, "cifar100", folder)
    write_folder(tmp_path / "b", files)
    write(tmp_path / "b", {"old/test_batch.bin": b"x"})
    with pytest.raises(JobError, match=r"test_batch\.bin exists beside"):
        describe(store, "cifar10", tmp_path / "b")


def test_a_malicious_pickle_runs_nothing(store: DatasetStore, tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    files = cifar10("python")
    folder = write_folder(tmp_path / "files", files)
    describe(store, "cifar10", folder, digests=False)  # which would have noticed it first
    good = (folder / "test_batch").read_bytes()
    evil = pickle.dumps({"data": Evil()})
    (folder / "test_batch").write_bytes(evil.ljust(len(good), b"\0"))
    with pytest.raises(DatasetDamaged, match=r"test, sample 1: .*/test_batch: cifar-python: it asks for posix\.mkdir"):
        DatasetReader.open("me/x", "test", store=store).read(1)
    with pytest.raises(JobError, match=r"test_batch is not a pickled CIFAR batch: it asks for posix\.mkdir"):
        describe(store, "cifar10", folder)
    (folder / "test_batch").write_bytes(py2_pickle({"data": np.zeros((3, 9), np.uint8)}).ljust(len(good), b"\0"))
    with pytest.raises(DatasetDamaged, match=r"its 'data' is not an array of uint8 \(N, 3072\)"):
        DatasetReader.open("me/x", "test", store=store).read(1)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("sep", ["-", "."])
def test_mnist_is_what_the_jobs_source_reads(store: DatasetStore, tmp_path: Path, gz: bool, sep: str) -> None:
    write_mnist(tmp_path, train=10, test=4, gz=gz, sep=sep)
    made = describe(store, "idx", tmp_path)
    assert {name: v.samples for name, v in made.variants.items()} == {"train": 10, "test": 4}
    expected = load(DataSpec(source="idx", path=tmp_path), seed=0)
    for variant, samples in (("train", expected.train), ("test", expected.test)):
        got = list(reader(store, variant))
        assert got[0].value.shape == (1, 4, 3)
        np.testing.assert_array_equal(np.stack([s.value for s in got]).astype(np.float32) / 255, samples.inputs)
        assert [s.target for s in got] == samples.targets.tolist()


def test_idx_of_other_types_and_what_is_none(store: DatasetStore, tmp_path: Path) -> None:
    write(tmp_path, {"train-images-idx2-float": idx_bytes(np.arange(15).reshape(5, 3) / 2, ">f4")})
    with pytest.raises(JobError, match="has no train-labels; fetch"):
        describe(store, "idx", tmp_path)
    write(tmp_path, {"train-labels-idx1-ubyte": idx_bytes(np.arange(5))})
    describe(store, "idx", tmp_path)
    assert reader(store).read(2).value.tolist() == [3, 3.5, 4]
    write(tmp_path, {"train-labels-idx1-ubyte": idx_bytes(np.arange(4))})
    with pytest.raises(JobError, match=r"has shape \(5, 3\), but train-labels-idx1-ubyte has \(4,\); give a pair"):
        describe(store, "idx", tmp_path)
    write(tmp_path, {"train-labels-idx1-ubyte": b"\0\0\x08\x01\0\0\0\x09"})
    with pytest.raises(JobError, match=r"train-labels-idx1-ubyte has 8 bytes, but its header states 17"):
        describe(store, "idx", tmp_path)
    with pytest.raises(JobError, match="has no train-images-idx3-ubyte and no t10k"):
        describe(store, "idx", write(tmp_path / "other", {"x": b""}))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from(["|u1", "<f4", ">f4", "<i8", "|b1", "<c8"]),
    packed=st.booleans(),
    wide=st.booleans(),
    count=st.integers(1, 9),
)
def test_npz(tmp_path_factory, shape: list[int], dtype: str, packed: bool, wide: bool, count: int) -> None:
    at = tmp_path_factory.mktemp("npz")
    store = DatasetStore.open(str(at / "store"))
    x = np.random.default_rng(1).integers(0, 2, (count, *shape)).astype(dtype)
    y = np.random.default_rng(2).normal(size=(count, 2)) if wide else np.arange(count)
    (np.savez_compressed if packed else np.savez)(at / "a.npz", inputs=x, y=y)
    describe(store, "npz", at / "a.npz", inputs="inputs")
    for i, sample in enumerate(reader(store)):
        np.testing.assert_array_equal(sample.value, x[i])
        np.testing.assert_array_equal(sample.target, y[i])
        assert sample.value.dtype == x.dtype.newbyteorder("=")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((3, 2))}, "has no array 'y', only x; -o targets=NAME"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4)}, r"inputs of shape \(3, 2\) and targets of \(4,\)"),
        ({"x": np.zeros(()), "y": np.zeros(())}, "one target per input"),
        ({"x": np.array([None, 1]), "y": np.zeros(2)}, r"x\.npy holds object in order C; save numbers in C order"),
        ({"x": np.asfortranarray(np.zeros((3, 2))), "y": np.zeros(3)}, "holds float64 in order F; save"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2)}, "holds <U1"),
    ],
)
def test_npz_that_is_none(store: DatasetStore, tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(JobError, match=message):
        describe(store, "npz", tmp_path / "a.npz")


def test_npz_is_one_file(store: DatasetStore, tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    for name in ("a", "b"):
        np.savez(tmp_path / "n" / f"{name}.npz", x=[1], y=[1])
    with pytest.raises(JobError, match=r"b\.npz exists beside a\.npz; give the URL of one file"):
        describe(store, "npz", tmp_path / "n")
    (tmp_path / "n" / "a.npz").write_bytes(b"PK")
    (tmp_path / "n" / "b.npz").unlink()
    with pytest.raises(JobError, match=r"a\.npz is not a valid archive"):
        describe(store, "npz", tmp_path / "n")


class TestCsv:
    TABLE = 'width,name,label\n1.5,"a, ""b""\nc",3\n\n2,plain,4\r\n-1.0e3,é,5'

    @pytest.mark.parametrize("gz", [False, True])
    def test_rows(self, store: DatasetStore, tmp_path: Path, gz: bool) -> None:
        data = self.TABLE.encode()
        path = write(tmp_path, {"t.csv.gz" if gz else "t.csv": gzip.compress(data) if gz else data})
        source = next(p for p in path.iterdir() if p.name.startswith("t.csv"))
        made = describe(store, "csv", source, target="label")
        assert made.variants["train"].info == {"columns": ["width", "name"], "target": "label"}
        samples = list(reader(store))
        assert [s.value for s in samples] == [
            {"width": 1.5, "name": 'a, "b"\nc'},
            {"width": 2.0, "name": "plain"},
            {"width": -1000.0, "name": "é"},
        ]
        assert [s.target for s in samples] == [3, 4, 5]

    @pytest.mark.parametrize(
        ("texts", "found"),
        [
            (["100_1", "1030_11"], ["100_1", "1030_11"]),
            (["00501", "02134"], ["00501", "02134"]),
            (["nan", "Infinity"], ["nan", "Infinity"]),
            (["٣", "٤"], ["٣", "٤"]),
            (["1e3", "2"], ["1e3", "2"]),
            (["9007199254740993", "0.5"], ["9007199254740993", "0.5"]),
            (["9007199254740993", "9007199254740992"], [9007199254740993, 9007199254740992]),
            (["1.50", "+5", " 7", "-0", "1e-3"], [1.5, 5.0, 7.0, 0.0, 0.001]),
            (["1", "2"], [1, 2]),
            (["1.5", ""], ["1.5", ""]),
            (['5" pipe', '6" pipe', "plain"], ['5" pipe', '6" pipe', "plain"]),
            (["a\u2028b\x85c", "d"], ["a\u2028b\x85c", "d"]),
        ],
    )
    def test_text_stays_text_and_numbers_are_those_that_are_written(self, store, tmp_path: Path, texts, found) -> None:
        table = "id,y\n" + "".join(f"{text},{n}\n" for n, text in enumerate(texts))
        describe(store, "csv", write(tmp_path / "t", {"a.csv": table.encode()}), target="id")
        assert [s.target for s in reader(store)] == found
        describe(store, "csv", tmp_path / "t", target="y")
        assert [s.value["id"] for s in reader(store)] == found

    def test_several_files_and_no_target(self, store: DatasetStore, tmp_path: Path) -> None:
        write(tmp_path / "t", {"a.csv": b"x;y\n1;2\n", "b.csv": b"x;y\n3;z\n"})
        describe(store, "csv", tmp_path / "t", delimiter=";")
        assert [(s.key, s.value, s.target) for s in reader(store)] == [
            ("a.csv[0]", {"x": 1, "y": "2"}, None),
            ("b.csv[0]", {"x": 3, "y": "z"}, None),
        ]

    @pytest.mark.parametrize(
        ("files", "options", "message"),
        [
            ({"a.csv": b"x,y\n1,2\n3\n"}, {}, r"a\.csv has 1 cells in line 3, but 2 columns"),
            ({"a.csv": b"x,y\n1,2\n", "b.csv": b"x,z\n1,2\n"}, {}, r"b\.csv has columns \['x', 'z'\]"),
            ({"a.csv": b"x,y\n1,2\n"}, {"target": "z"}, "has no column 'z'; it has: x, y"),
            ({"a.csv": b"x,y\n1,\xff\n"}, {}, "has a record in line 2 that is not UTF-8"),
            ({"a.csv": b'x,y\n1,2\n3,"2\n4,5\n'}, {}, r"a\.csv, line 3: a quote is not closed; close it, or double it"),
            ({"a.csv": b'x,y\n1,2\n3,"2\n4,5\n'}, {"on_defect": "skip"}, r"a\.csv, line 3: a quote is not closed"),
            ({"a.csv": b"x,x,y\n1,2,3\n"}, {"on_defect": "skip"}, r"a\.csv has two columns 'x'"),
            ({"a.csv": b"x,y\r1,2\r"}, {}, "its header has a carriage return that is not quoted"),
            ({"a.csv": b"x,y\n1,2\r3,4\n"}, {}, "has a record in line 2 that has a carriage return that is not quoted"),
            ({"a.csv": "x,y\n1,2\n".encode("utf-16")}, {}, "is UTF-16, and only UTF-8 is read; iconv -f UTF-16"),
            ({"a.csv": b"\n\nx,y\n1,2\n"}, {}, "begins with a blank line, where its header should be"),
            ({"a.csv": b"x\0,y\n1,2\n"}, {}, "its header has bytes of 0"),
            ({"a.csv": b"", "b.csv": b"x\n1\n"}, {}, r"a\.csv has no header line"),
            ({"a.csv": b"x,y\n1,2\n", "b.tsv": b"x\ty\n1\t2\n"}, {}, r"has \.csv and \.tsv files"),
            ({"a.csv": b"x,y\n"}, {}, "there are no samples"),
            ({"a.csv.gz": b"x,y\n1,2\n"}, {}, r"a\.csv\.gz cannot be unpacked"),
            ({"a.txt": b"x,y\n"}, {}, "has no tables"),
        ],
    )
    def test_tables_that_are_none(self, store, tmp_path: Path, files, options: dict[str, str], message: str) -> None:
        with pytest.raises(JobError, match=message):
            describe(store, "csv", write(tmp_path / "t", files), **options)


class TestParquet:
    def write(self, folder: Path, name: str, rows: list[dict[str, object]], group: int = 3) -> Path:
        pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        import pyarrow.parquet as pq

        folder.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / name, row_group_size=group)
        return folder / name

    def rows(self, count: int, first: int = 0) -> list[dict[str, object]]:
        return [{"n": i, "text": f"t{i}", "list": [i, i + 0.5], "y": i % 3} for i in range(first, first + count)]

    def test_rows(self, any_store: DatasetStore, tmp_path: Path) -> None:
        folder = tmp_path / "t"
        self.write(folder, "a.parquet", self.rows(7))
        self.write(folder, "b.parquet", self.rows(2, 7))
        made = describe(any_store, "parquet", folder, target="y")
        assert made.variants["train"].info == {"columns": ["n", "text", "list"], "target": "y"}
        samples = list(reader(any_store))
        expected = self.rows(9)
        assert [s.target for s in samples] == [row.pop("y") for row in expected]
        assert [s.value for s in samples] == expected
        got = reader(any_store).read_many([8, 0, 5])
        assert [s.value["n"] for s in got] == [8, 0, 5]

    def test_images_in_a_column(self, store: DatasetStore, tmp_path: Path) -> None:
        arrays = [pixels() for _ in range(5)]
        rows = [{"image": {"bytes": png(a), "path": f"{i}.png"}, "label": i} for i, a in enumerate(arrays)]
        path = self.write(tmp_path, "a.parquet", rows)
        describe(store, "parquet", path, target="label", data="image.bytes")
        for i, sample in enumerate(reader(store)):
            np.testing.assert_array_equal(sample.value, arrays[i])
            assert sample.target == i

    def test_a_row_group_is_read_once(self, store: DatasetStore, tmp_path: Path) -> None:
        describe(store, "parquet", self.write(tmp_path, "a.parquet", self.rows(9)), target="y")
        got = DatasetReader.open("me/x", "train", store=store)
        got.read_many(range(9))
        got.read_many(range(9))
        cache = got._fetcher().unpacked
        assert len(cache) == 3
        assert cache.misses == 9
        assert cache.hits == 9

    def test_tables_that_are_none(self, store: DatasetStore, tmp_path: Path) -> None:
        import datetime

        path = self.write(tmp_path / "a", "a.parquet", self.rows(3))
        with pytest.raises(JobError, match="has no column 'label'"):
            describe(store, "parquet", path, target="label")
        with pytest.raises(JobError, match="has no column 'image'"):
            describe(store, "parquet", path, data="image.bytes")
        self.write(tmp_path / "a", "b.parquet", [{"z": 1}])
        with pytest.raises(JobError, match=r"b\.parquet has columns \['z'\], but a\.parquet has"):
            describe(store, "parquet", tmp_path / "a")
        times = self.write(tmp_path / "c", "c.parquet", [{"t": datetime.datetime(2024, 1, 1)}])
        with pytest.raises(JobError, match="has datetime in column 't', row 0 of row group 0, which is not a target"):
            describe(store, "parquet", times, target="t")
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(JobError, match=r"a\.parquet is not a Parquet file"):
            describe(store, "parquet", path)
        with pytest.raises(JobError, match="is inside an archive; unpack the archive"):
            describe(store, "parquet", tar(tmp_path / "x.tar", {"a.parquet": b"x"}))

    def test_damage_after_the_import(self, store: DatasetStore, tmp_path: Path) -> None:
        path = self.write(tmp_path / "a", "a.parquet", self.rows(7))
        describe(store, "parquet", path, target="y", digests=False)  # which would have noticed it first
        whole = path.read_bytes()
        path.write_bytes(whole[:-10])
        with pytest.raises(DatasetDamaged, match=r"train, sample 6: .*/a\.parquet: parquet: "):
            DatasetReader.open("me/x", "train", store=store).read(6)
        self.write(tmp_path / "a", "a.parquet", self.rows(2))
        with pytest.raises(DatasetDamaged, match="row group 2 of a file with 1"):
            DatasetReader.open("me/x", "train", store=store).read(6)
        with pytest.raises(DatasetDamaged, match="row 2 of a row group with 2"):
            DatasetReader.open("me/x", "train", store=store).read(2)
        path.unlink()
        with pytest.raises(DatasetDamaged, match=r"sample 2: .*a\.parquet: the file is absent"):
            DatasetReader.open("me/x", "train", store=store).read(2)


def test_image_modes_are_converted(store: DatasetStore, tmp_path: Path) -> None:
    grey = RNG.integers(0, 256, (4, 4), dtype=np.uint8)
    describe(store, "images", write(tmp_path / "p", {"a/1.png": png(grey)}))
    value = reader(store).read(0).value
    assert value.shape == (4, 4, 3)
    np.testing.assert_array_equal(value[..., 1], grey)
    value += 1


def test_a_truncated_image_is_named(store: DatasetStore, tmp_path: Path) -> None:
    whole = png(pixels(50, 50))
    source = write(tmp_path / "p", {"a/1.png": whole[: len(whole) // 2], "a/2.png": whole})
    describe(store, "images", source)
    got = DatasetReader.open("me/x", "train", store=store)
    assert got.read(1).value.shape == (50, 50, 3)
    with pytest.raises(DatasetDamaged, match=r"sample 0: file:///.*/a/1\.png: image of a/1\.png cannot be decoded"):
        got.read(0)


def test_the_command_line_offers_every_kind_and_says_what_its_options_are() -> None:
    assert set(cli.KINDS) == set(KINDS)
    rows = {line.split()[0]: line for line in (cli.import_.help or "").splitlines() if line.split()}
    for kind, importer in KINDS.items():
        assert all(f"{option}=" in rows[kind] for option in importer.options)


def test_importers_cost_no_library_until_they_are_used() -> None:
    program = "import json, sys, ephemeron.data.catalog.importers; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(json.loads(done.stdout)) & {"obstore", "PIL", "pyarrow", "soundfile", "torch", "click", "rich"}


def test_the_source_is_remembered(store: DatasetStore, tmp_path: Path) -> None:
    path = write_folder(tmp_path, cifar100("binary"))
    made = describe(store, "cifar100", path, labels="coarse")
    assert made.variants["test"].source == {"kind": "cifar100", "url": str(path), "options": {"labels": "coarse"}}
    document = made.to_json()
    assert Dataset.from_json(json.loads(json.dumps(document))).to_json() == document
    shard = made.shard_path("train", 0)
    (data,) = run(store.files.fetch([FileRange(shard)]))
    overwrite(store, shard, data)
    assert len(reader(store)) == 3
