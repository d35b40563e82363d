"""`ephemeron data` end to end: what it prints, exit codes, one line for each mistake and defect."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from test_cifar import cifar100, write_folder

from ephemeron.cli.main import main
from ephemeron.data.catalog import DatasetReader


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, arguments)])


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    return write_folder(tmp_path, cifar100("binary"))


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    np.savez(tmp_path / "a.npz", x=np.arange(12).reshape(6, 2), y=np.arange(6))
    return tmp_path / "a.npz"


def test_import_ls_and_check_in_the_default_store(home: Path, cifar: Path, npz: Path) -> None:
    assert "no datasets in file:///" in run("ls").stdout
    done = run("import", "cifar100", cifar, "core/cifar100", "-o", "labels=coarse")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == "published core/cifar100 version 1: train (3 samples), test (3 samples)\n"
    done = run("import", "npz", npz, "me/a", "--variant", "val", "--version", "2024", "--shard-size", 2, "--json")
    assert json.loads(done.stdout)["variants"]["val"]["shards"] == 3
    assert DatasetReader.open("me/a", "val").read(4).value.tolist() == [8, 9]
    listed = run("ls").stdout
    assert [line.split()[:4] for line in listed.splitlines()] == [
        ["dataset", "version", "variant", "samples"],
        ["core/cifar100", "1", "train", "3"],
        ["core/cifar100", "1", "test", "3"],
        ["me/a", "2024", "val", "6"],
    ]
    assert "image: array" in listed
    assert cifar.as_uri() in listed
    checked = run("verify", "core/cifar100", "--all")
    assert checked.exit_code == 0
    assert checked.stdout.splitlines() == [
        "core/cifar100 version 1, train: 3 samples in 1 file (9.2 kB), 3 of 3 compared with their digests, 3 decoded: no defects",
        "core/cifar100 version 1, test: 3 samples in 1 file (9.2 kB), 3 of 3 compared with their digests, 3 decoded: no defects",
    ]
    assert checked.stderr == ""


def test_versions_and_variants(home: Path, npz: Path) -> None:
    for arguments in (["--variant", "train"], ["--variant", "val"], ["--variant", "test", "--only"]):
        assert run("import", "npz", npz, "me/a", *arguments).exit_code == 0
    rows = [json.loads(line) for line in run("ls", "me/a", "--json").stdout.splitlines()]
    assert [(r["version"], list(r["variants"])) for r in rows] == [("1", ["train"]), ("2", ["train", "val"]), ("3", ["test"])]
    assert [json.loads(line)["version"] for line in run("ls", "--json").stdout.splitlines()] == ["3"]
    assert run("verify", "me/a", "--version", "2", "--variant", "val").stdout.count("\n") == 1
    again = run("import", "npz", npz, "me/a", "--version", "2")
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr == ("error: version '2' of me/a is published, and versions do not change; choose another name, or none\n")


def test_files_that_are_no_images_are_counted(home: Path, tmp_path: Path) -> None:
    (tmp_path / "p" / "cat").mkdir(parents=True)
    for name in ("1.jpg", "notes.txt", "more.txt"):
        (tmp_path / "p" / "cat" / name).write_bytes(b"x")
    done = run("import", "images", tmp_path / "p", "me/p")
    assert done.stderr == f"note: train: passed over in {tmp_path / 'p'}: 2 files, no images\n"
    assert done.stdout == "published me/p version 1: train (1 sample)\n"


def test_a_store_by_url_and_copied_data(tmp_path: Path, npz: Path, s3: str) -> None:
    for store in (f"{s3}/cli", str(tmp_path / "st ore")):
        assert run("import", "npz", npz, "me/a", "--copy", "--store", store).exit_code == 0
    npz.unlink()
    for store in (f"{s3}/cli", str(tmp_path / "st ore")):
        checked = run("verify", "me/a", "--store", store, "--json")
        assert json.loads(checked.stdout) == {
            "dataset": "me/a",
            "version": "1",
            "variant": "train",
            "samples": 6,
            "files": 1,
            "bytes": 96,
            "pinned": 6,
            "unpinned": 0,
            "decoded": 6,
            "defects": [],
        }
        assert "own folder" in run("ls", "--store", store).stdout


def test_every_defect_is_a_line_and_the_exit_code_says_so(home: Path, npz: Path) -> None:
    run("import", "npz", npz, "me/a", "--shard-size", 2)
    (shard,) = (home / "datasets-store/datasets/me/a/meta/train").glob("ms-2.*.json")
    shard.write_bytes(b"")
    whole = npz.read_bytes()
    npz.write_bytes(whole[: whole.index(np.arange(12).tobytes()) + 3 * 16])
    checked = run("verify", "me/a")
    assert checked.exit_code == 1
    assert "6 samples in 1 file (64 B), 4 of 6 compared with their digests, 3 decoded: 2 defects" in checked.stdout
    lines = checked.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("me/a version 1, train, sample 3: a.npz has 231 bytes, but bytes 231 to 247")
    assert lines[1].startswith("me/a, version 1, train, sample 4: file:///")


def test_leftovers_of_a_dead_import_are_a_note(home: Path, npz: Path) -> None:
    run("import", "npz", npz, "me/a")
    (home / "datasets-store/datasets/me/a/meta/train/ms-7.0.json").write_bytes(b"1234")
    checked = run("verify", "me/a")
    assert checked.exit_code == 0
    assert checked.stderr == "note: 1 metadata files belong to no version (4 bytes)\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["import", "npz", "/no/such/file.npz", "me/a"], "file.npz does not exist or is empty; give"),
        (["import", "npz", "x", "me"], "dataset 'me' is not of the form namespace/name"),
        (["import", "npz", "x", "me/a", "-o", "inputs"], "-o inputs has no value; write -o inputs=VALUE"),
        (["import", "npz", "x", "me/a", "-o", "colour=red"], "has no option 'colour'; it takes: inputs, targets"),
        (["import", "bmp", "x", "me/a"], "'bmp' is not one of 'images'"),
        (["ls", "me/a"], "dataset me/a is not in"),
        (["verify", "me/a"], "dataset me/a is not in"),
        (["ls", "--store", "ftp://x"], "names no bucket"),
    ],
)
def test_mistakes_are_told_in_a_line(home: Path, arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert not home.exists()


def test_help_teaches() -> None:
    text = run("--help").stdout
    assert "ephemeron data import images" in text
    assert "ephemeron data verify" in text
    for kind in ("images", "coco", "librispeech", "cifar10", "cifar100", "idx", "npz", "csv", "parquet"):
        assert f"\n  {kind}" in run("import", "--help").stdout
