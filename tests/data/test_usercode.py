from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ephemeron.config.user_code import resolve
from ephemeron.errors import JobError

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
    assert str(e.value) == (f"nowhere:x: there is no module 'nowhere' in {tmp_path}, {tmp_path / 'pkg'}; add its folder to 'code'")
    with pytest.raises(JobError, match=r"there is no module 'pkg\.other' in"):
        resolve("pkg.other:x", [tmp_path])
    with pytest.raises(JobError, match="there is no module 'nowhere' in no folders"):
        resolve("nowhere:x", [])


def test_a_module_that_imports_something_absent(tmp_path: Path) -> None:
    write(tmp_path, um_py="\nimport not_there_at_all")
    with pytest.raises(
        JobError, match=r"um:x: importing um raised ModuleNotFoundError: No module named 'not_there_at_all' \(um\.py, line 2\)"
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


def test_a_target_in_the_program_itself_is_refused():
    with pytest.raises(JobError, match=r"'__main__:build' is in the program .*; put it into a file beside the job"):
        resolve("__main__:build", [])
