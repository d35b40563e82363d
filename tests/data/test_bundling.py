"""What travels of the user's folders, and what is refused on the way back."""

from __future__ import annotations

import io
import os
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from ephemeron.config.code_bundle import Selection, bundle, left_out, state_of, unbundle
from ephemeron.config.user_code import resolve
from ephemeron.errors import CorruptMessage, JobError

pytestmark = pytest.mark.usefixtures("clean_imports")


def write(root: Path, **files: str) -> Path:
    """Files by name, with `__` for a slash and `_py` for the suffix."""
    for name, text in files.items():
        path = root / (name.removesuffix("_py").replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def project(root: Path) -> Path:
    for name in (
        "model.py",
        "pkg/__init__.py",
        "pkg/net.py",
        "job.toml",
        "words.txt",
        "c.yaml",
        "build/__init__.py",
        "build/own.py",
        ".env.json",
        ".git/x.py",
        "__pycache__/model.py",
        "venv/pyvenv.cfg",
        "venv/lib/y.py",
        "node_modules/z.json",
        "dist/w.py",
        "init.safetensors",
        "x.egg-info/top.txt",
        "pkg/vocab.bin",
        "data/train.npz",
        "data/labels.csv",
        "data/reader.py",
        "runs/1/weights.bin",
        "model.pyc",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    return root


def names_of(data: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(data)).namelist()


def test_bundle_takes_what_code_may_read_and_nothing_else(tmp_path: Path) -> None:
    project(tmp_path / "a")
    write(tmp_path / "b", other_py="")
    assert names_of(bundle([tmp_path / "a", tmp_path / "b"])) == [
        "0/",
        "1/",
        "0/build/__init__.py",
        "0/build/own.py",
        "0/c.yaml",
        "0/data/reader.py",
        "0/init.safetensors",
        "0/job.toml",
        "0/model.py",
        "0/pkg/__init__.py",
        "0/pkg/net.py",
        "0/pkg/vocab.bin",
        "0/words.txt",
        "1/other.py",
    ]
    assert [p.name for p in left_out([tmp_path / "a"])] == ["model.pyc", "labels.csv", "train.npz", "weights.bin"]


@pytest.mark.parametrize(
    ("selection", "more", "less"),
    [
        ({"include": ("data/labels.csv",)}, {"data/labels.csv"}, set()),
        ({"include": ("*.npz",)}, {"data/train.npz"}, set()),
        ({"include": ("runs",)}, {"runs/1/weights.bin"}, set()),
        ({"exclude": ("*.safetensors", "pkg/")}, set(), {"init.safetensors", "pkg/__init__.py", "pkg/net.py", "pkg/vocab.bin"}),
        ({"exclude": ("*.bin",), "include": ("pkg/*.bin",)}, set(), set()),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_the_job_says_what_else_travels_and_what_stays(tmp_path: Path, selection, more, less) -> None:
    project(tmp_path)
    usual = set(names_of(bundle([tmp_path])))
    got = set(names_of(bundle([tmp_path], Selection(**selection))))
    assert got == (usual | {f"0/{n}" for n in more}) - {f"0/{n}" for n in less}


def test_samples_that_travel_in_another_way_stay_but_code_beside_them_does_not(tmp_path: Path) -> None:
    project(tmp_path)
    got = set(names_of(bundle([tmp_path], Selection(apart=(tmp_path,)))))
    assert "0/model.py" in got
    assert "0/init.safetensors" not in got


def test_what_is_asked_for_has_to_be_there_and_may_be_larger(tmp_path: Path) -> None:
    project(tmp_path)
    (tmp_path / "init.safetensors").write_bytes(bytes(3_000_000))
    with pytest.raises(JobError, match=r"code_include has 'int.safetensors', and no file"):
        bundle([tmp_path], Selection(include=("int.safetensors",)))
    with pytest.raises(JobError, match=r"init.safetensors \(3.0 MB\).*code_exclude"):
        bundle([tmp_path], limit=1_000_000)
    assert len(bundle([tmp_path], Selection(include=("init.safetensors",)), limit=1_000_000)) > 3_000_000


def test_bundle_is_deterministic(tmp_path: Path) -> None:
    a, b = project(tmp_path / "a"), project(tmp_path / "b")
    os.utime(b / "model.py", (1, 1))
    (b / "model.py").chmod(0o700)
    assert bundle([a]) == bundle([b])
    (b / "model.py").write_text("changed")
    assert bundle([a]) != bundle([b])


def test_round_trip(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", first_py="import second\nx = second.x"), write(tmp_path / "b", second_py="x = 7")
    (tmp_path / "empty").mkdir()
    folders = unbundle(bundle([a, tmp_path / "empty", b]), tmp_path / "out")
    assert folders == [tmp_path / "out" / i for i in "012"]
    assert [f.is_dir() for f in folders] == [True] * 3
    assert resolve("first:x", folders) == 7
    assert Path(sys.modules["first"].__file__).is_relative_to(tmp_path / "out")
    assert unbundle(bundle([a, tmp_path / "empty", b]), tmp_path / "out") == folders
    assert unbundle(bundle([]), tmp_path / "none") == []


def test_more_than_ten_folders_keep_their_order(tmp_path: Path) -> None:
    folders = [write(tmp_path / str(i), m_py=str(i)) for i in range(12)]
    back = unbundle(bundle(folders), tmp_path / "out")
    assert [(f / "m.py").read_text() for f in back] == [str(i) for i in range(12)]


def test_too_much_names_the_largest(tmp_path: Path) -> None:
    for name, size in (("a.txt", 10), ("big.pt", 3_000_000), ("large.py", 2_000_000), ("c.py", 1_000_000)):
        (tmp_path / name).write_bytes(bytes(size))
    with pytest.raises(JobError) as e:
        bundle([tmp_path], limit=5_000_000)
    assert str(e.value).startswith(
        f"code has 6.0 MB, the limit is 5.0 MB; largest: {tmp_path / 'big.pt'} (3.0 MB), {tmp_path / 'large.py'} (2.0 MB)"
    )
    with pytest.raises(JobError, match=r"code folder .*gone does not exist"):
        bundle([tmp_path / "gone"])


def test_data_beside_the_code_stay_unless_a_source_names_them_and_they_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "model.py").write_text("ROWS = open('lookup.csv')\nWORDS = 'vocabulary.npy', 'sales.parquet'\n")
    for name in ("lookup.csv", "vocabulary.npy", "other.csv", "other.npz", "old.zip"):
        (tmp_path / name).write_bytes(bytes(1000))
    (tmp_path / "sales.parquet").write_bytes(bytes(30_000_000))
    for name in ("prepared/train/dataset.json", "prepared/train/part-0.arrow", "L.zarr/zarr.json", "L.zarr/c/0", "prepared/README.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert set(names_of(bundle([tmp_path]))) == {"0/", "0/lookup.csv", "0/model.py", "0/prepared/README.txt", "0/vocabulary.npy"}
    assert "sales.parquet (30.0 MB) is not sent with the code beside it; functions that read it need code_include" in caplog.text
    more = bundle([tmp_path], Selection(include=("sales.parquet", "prepared/train")))
    assert {"0/sales.parquet", "0/prepared/train/part-0.arrow", "0/prepared/train/dataset.json"} <= set(names_of(more))


def test_a_large_text_is_sent_while_there_is_room_for_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    for name, size in (("tokenizer.json", 3_000_000), ("items.json", 30_000_000)):
        (tmp_path / name).write_bytes(b" " * size)
    assert set(names_of(bundle([tmp_path]))) == {"0/", "0/model.py", "0/tokenizer.json"}


def test_a_text_that_goes_while_its_folder_is_looked_at_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.py", "half.txt", "notes.json"):
        (tmp_path / name).write_text("")
    stat_of = Path.stat

    def stat(path: Path, **how: bool) -> os.stat_result:
        if path.name == "half.txt" and sys._getframe(1).f_code.co_name != "is_file":
            raise FileNotFoundError(path)
        return stat_of(path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    assert [name for name, *_ in state_of(tmp_path)] == ["0/model.py", "0/notes.json"]


def test_a_file_lists_what_is_not_sent(tmp_path: Path) -> None:
    project(tmp_path)
    (tmp_path / ".ephemeronignore").write_text("# weights of yesterday\n\n*.safetensors\n/pkg/\n")
    usual = set(names_of(bundle([tmp_path])))
    assert "0/init.safetensors" not in usual
    assert not [name for name in usual if name.startswith("0/pkg")]
    assert "0/pkg/vocab.bin" in names_of(bundle([tmp_path], Selection(include=("pkg/vocab.bin",))))
    (tmp_path / ".ephemeronignore").write_text("!model.py\n")
    with pytest.raises(JobError, match=r"line 1: '!model.py' adds files; name them in code_include"):
        bundle([tmp_path])


def zipped(name: str, mode: int = stat.S_IFREG) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("0/fine.py", "")
        entry = zipfile.ZipInfo("placeholder")
        entry.filename = name
        entry.external_attr = (mode | 0o644) << 16
        archive.writestr(entry, "evil")
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["../evil.py", "0/../../evil.py", "/evil.py", "evil.py", "x/evil.py", "0\\..\\evil.py", "²/e"])
def test_zip_slip_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(CorruptMessage, match="is not inside a numbered folder") as e:
        unbundle(zipped(name), tmp_path / "in" / "out")
    assert repr(name) in str(e.value)
    assert not list(tmp_path.rglob("*.py"))


def test_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptMessage, match="has a link '0/l'"):
        unbundle(zipped("0/l", stat.S_IFLNK), tmp_path)


def test_a_link_that_lies_in_wait_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptMessage, match=r"'0/fine.py'"):
        unbundle(zipped("0/x.py"), tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_damage(tmp_path: Path) -> None:
    whole = bundle([write(tmp_path / "a", m_py="x = 1\n" * 100)])
    flipped = bytearray(whole)
    flipped[whole.index(b"0/a" if b"0/a" in whole else b"0/m.py") + 12] ^= 0xFF
    for data in (b"", b"no zip", whole[:-10], bytes(flipped)):
        with pytest.raises(CorruptMessage, match=f"code bundle of {len(data)} bytes is damaged"):
            unbundle(data, tmp_path / "out")
