from __future__ import annotations

import io
import os
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from ephemeron.data import bundle, resolve, unbundle
from ephemeron.errors import CorruptMessage, JobError

pytestmark = pytest.mark.usefixtures("clean_imports")


def write(root: Path, **files: str) -> Path:
    """Files by name, with `__` for a slash and `_py` for the suffix."""
    for name, text in files.items():
        path = root / (name.removesuffix("_py").replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_resolve(tmp_path: Path) -> None:
    write(tmp_path, um_py="class A:\n    value = 3\n", pkg__sub_py="import um\nname = um.A\n")
    assert resolve("um:A.value", [tmp_path]) == 3
    assert resolve("pkg.sub:name", [tmp_path]) is resolve("um:A", [tmp_path])


def test_installed_modules_need_no_folder() -> None:
    assert resolve("os.path:join", []) is os.path.join


def test_folders_are_put_in_front_once_and_stay(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", um_py="x = 'a'"), write(tmp_path / "b", um_py="x = 'b'")
    before = list(sys.path)
    for _ in range(2):
        assert resolve("um:x", [a, b]) == "a"
        assert sys.path == [str(a), str(b), *before]


def test_each_job_gets_its_own_module(tmp_path: Path) -> None:
    a = write(tmp_path / "a", um_py="from uh import x", uh_py="x = 'a'")
    b = write(tmp_path / "b", um_py="from uh import x", uh_py="x = 'b'")
    assert [resolve("um:x", [f]) for f in (a, b, a)] == ["a", "b", "a"]


def test_each_job_gets_its_own_package(tmp_path: Path) -> None:
    for kind in ("regular", "namespace"):
        folders = [write(tmp_path / kind / j, **{f"p{kind}__m_py": f"x = '{j}'"}) for j in "ab"]
        if kind == "regular":
            for f in folders:
                (f / f"p{kind}" / "__init__.py").touch()
        assert [resolve(f"p{kind}.m:x", [f]) for f in folders] == ["a", "b"]


def test_the_copy_of_what_the_user_has_imported_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write(tmp_path / "own", um_py="x = 'own'")
    monkeypatch.syspath_prepend(own)
    import um

    assert um.x == "own"
    assert resolve("um:x", [write(tmp_path / "copy", um_py="x = 'copy'")]) == "copy"


def test_modules_of_the_interpreter_and_of_packages_are_not_displaced(tmp_path: Path) -> None:
    write(tmp_path, json_py="x = 1", numpy_py="x = 1", time_py="x = 1")
    import numpy as np

    for name in ("json", "numpy", "time"):
        with pytest.raises(JobError, match=rf"{name}\.py is hidden by the module '{name}'.*; rename the file"):
            resolve(f"{name}:x", [tmp_path])
    assert sys.modules["numpy"] is np


@pytest.mark.parametrize("target", ["um", "um:", ":x", "", "a:b:c", "a b:c", ".um:x", "um:x.", "../um:x"])
def test_malformed(target: str) -> None:
    with pytest.raises(JobError, match=r"is not of the form module:name; write e.g. 'model:build'") as e:
        resolve(target, [])
    assert repr(target) in str(e.value)


def test_absent_module_names_the_folders(tmp_path: Path) -> None:
    write(tmp_path, um_py="import not_there_at_all", pkg__sub_py="")
    with pytest.raises(JobError) as e:
        resolve("nowhere:x", [tmp_path, tmp_path / "pkg"])
    assert str(e.value) == (
        f"nowhere:x: there is no module 'nowhere' in {tmp_path}, {tmp_path / 'pkg'}; add its folder to 'code'"
    )
    with pytest.raises(JobError, match=r"there is no module 'pkg\.other' in"):
        resolve("pkg.other:x", [tmp_path])
    with pytest.raises(JobError, match="there is no module 'nowhere' in no folders"):
        resolve("nowhere:x", [])


def test_a_module_that_imports_something_absent(tmp_path: Path) -> None:
    write(tmp_path, um_py="\nimport not_there_at_all")
    with pytest.raises(
        JobError,
        match=r"um:x: importing um raised ModuleNotFoundError: No module named 'not_there_at_all' \(um\.py, line 2\)",
    ):
        resolve("um:x", [tmp_path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\nraise ValueError('one\\ntwo')", r"raised ValueError: one two \(um\.py, line 2\)"),
        ("\n\nx = = 3", r"raised SyntaxError: invalid syntax \(um\.py, line 3\)"),
        ("import sys\nsys.exit(3)", r"raised SystemExit: 3 \(um\.py, line 2\)"),
        ("import json\n\njson.loads('{')", r"raised JSONDecodeError: .* \(um\.py, line 3\)"),
        ("assert False", r"raised AssertionError \(um\.py, line 1\)"),
    ],
)
def test_a_module_that_raises(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, um_py=text)
    with pytest.raises(JobError, match=message) as e:
        resolve("um:x", [tmp_path])
    assert "\n" not in str(e.value)
    assert e.value.__cause__ is not None


def test_absent_name(tmp_path: Path) -> None:
    write(tmp_path, um_py="def build(): ...\ndef train(): ...\nclass Net: ...\n")
    with pytest.raises(JobError, match=r"um:biuld: um has no name 'biuld'; did you mean build\?"):
        resolve("um:biuld", [tmp_path])
    with pytest.raises(JobError, match="it has: Net, build, train"):
        resolve("um:zzzz", [tmp_path])


def project(root: Path) -> Path:
    for name in (
        "model.py", "pkg/__init__.py", "pkg/net.py", "job.toml", "words.txt", "c.yaml", "build/__init__.py", "build/own.py",
        ".env.json", ".git/x.py", "__pycache__/model.py", "venv/pyvenv.cfg", "venv/lib/y.py", "node_modules/z.json",
        "dist/w.py", "data.npz", "x.egg-info/top.txt", "weights.bin",
    ):  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    return root


def test_bundle_takes_code_and_nothing_else(tmp_path: Path) -> None:
    project(tmp_path / "a")
    write(tmp_path / "b", other_py="")
    names = zipfile.ZipFile(io.BytesIO(bundle([tmp_path / "a", tmp_path / "b"]))).namelist()
    assert names == [
        "0/", "1/", "0/build/__init__.py", "0/build/own.py", "0/c.yaml", "0/job.toml", "0/model.py", "0/pkg/__init__.py",
        "0/pkg/net.py", "0/words.txt", "1/other.py",
    ]  # fmt: skip


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
    for name, size in (("a.txt", 10), ("big.json", 3_000_000), ("large.txt", 2_000_000), ("c.py", 1_000_000)):
        (tmp_path / name).write_bytes(bytes(size))
    with pytest.raises(JobError) as e:
        bundle([tmp_path], limit=5_000_000)
    assert str(e.value).startswith(
        f"code has 6.0 MB, the limit is 5.0 MB; largest: {tmp_path / 'big.json'} (3.0 MB), {tmp_path / 'large.txt'} (2.0 MB)"
    )
    with pytest.raises(JobError, match=r"code folder .*gone does not exist"):
        bundle([tmp_path / "gone"])


def zipped(name: str, mode: int = stat.S_IFREG) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("0/fine.py", "")
        entry = zipfile.ZipInfo("placeholder")
        entry.filename = name
        entry.external_attr = (mode | 0o644) << 16
        archive.writestr(entry, "evil")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name", ["../evil.py", "0/../../evil.py", "/evil.py", "evil.py", "x/evil.py", "0\\..\\evil.py", "²/e"]
)
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
