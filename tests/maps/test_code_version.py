"""What makes results another version, and what does not."""

from __future__ import annotations

import importlib
import sys
import textwrap

import pytest

from ephemeron.config.code_bundle import Selection
from ephemeron.maps.code_version import code_version

FILES = {
    "versioned_main.py": "import os\nfrom versioned_help import helper\nfrom versioned_pack import part\n\n# a remark\ndef f(x):\n    open_table = 'lookup.csv'\n    return helper(x) + part.g(x)\n",
    "versioned_help.py": "def helper(x):\n    return x\n",
    "versioned_pack/__init__.py": "",
    "versioned_pack/part.py": "from .deep import g\n",
    "versioned_pack/deep.py": "def g(x):\n    return 2 * x\n",
    "unrelated.py": "x = 1\n",
    "lookup.csv": "a,b\n",
    "notes.txt": "nothing",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("versioned_")]:
        del sys.modules[name]


def version(**options):
    importlib.invalidate_caches()
    return code_version(importlib.import_module("versioned_main").f, **options)


@pytest.mark.parametrize(
    ("name", "text", "is_same"),
    [
        ("versioned_main.py", FILES["versioned_main.py"].replace("# a remark\n", "").replace("return", "return  # why\n   "), False),
        ("versioned_main.py", FILES["versioned_main.py"].replace("# a remark", "# another remark"), True),
        ("versioned_main.py", FILES["versioned_main.py"].replace("# a remark\n", ""), True),
        ("versioned_help.py", "def helper(x):\n    return -x\n", False),
        ("versioned_pack/deep.py", "def g(x):\n    return 3 * x\n", False),
        ("versioned_pack/__init__.py", "y = 1\n", False),
        ("lookup.csv", "a,c\n", True),  # it may be what the function, or its client, writes
        ("unrelated.py", "x = 2\n", True),
        ("notes.txt", "something", True),
    ],
)
def test_what_it_imports_and_names_counts(folder, name, text, is_same):
    before = version()
    (folder / name).write_text(text)
    assert (version() == before) is is_same


def test_what_is_included_or_given_counts(folder):
    before = version()
    assert version(selection=Selection(include=("notes.txt",))) == before  # it is sent anyway, and no source names it
    (folder / "weights.npy").write_bytes(b"1")
    included = version(selection=Selection(include=("weights.npy",)))
    assert included != version()
    (folder / "weights.npy").write_bytes(b"2")
    assert version(selection=Selection(include=("weights.npy",))) != included
    with pytest.raises(Exception, match=r"code_include has 'absent\.bin'"):
        version(selection=Selection(include=("absent.bin",)))
    assert version(given="v1") != version(given="v2")
    given = version(given="v1")
    (folder / "versioned_help.py").write_text("def helper(x):\n    return -x\n")
    assert version(given="v1") == given


def made(text, **names):
    scope = {"__name__": "__main__", **names}
    exec(textwrap.dedent(text), scope)
    return scope["f"]


def test_functions_of_a_notebook_count_by_what_they_do():
    first = made("def helper(x):\n    return x\ndef f(x):\n    return helper(x) + K\n", K=1)
    same = made("\n\n\ndef helper(x):\n    return x\n\ndef f(x):\n    return helper(x) + K\n", K=1)
    assert code_version(first) == code_version(same)
    for other in (
        made("def helper(x):\n    return -x\ndef f(x):\n    return helper(x) + K\n", K=1),
        made("def helper(x):\n    return x\ndef f(x):\n    return helper(x) + K\n", K=2),
        made("def helper(x):\n    return x\ndef f(x, y=3):\n    return helper(x) + K\n", K=1),
    ):
        assert code_version(other) != code_version(first)

    def adder(n):
        return lambda x: x + n

    assert code_version(adder(1)) == code_version(adder(1)) != code_version(adder(2))
