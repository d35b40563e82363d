"""The package's own structure: nothing climbs, circles and folders are small, and what users see changes on purpose alone."""

from __future__ import annotations

import difflib

import pytest

from structure import REGISTRIES, SNAPSHOTS, TAKEN, Structure, abstract_methods, keys

LARGEST_CIRCLE = 2
LARGEST_FOLDER = 30
MOST_ABSTRACT = 6


@pytest.fixture(scope="module")
def structure() -> Structure:
    return Structure()


def test_no_string_names_a_module_outside_of_registries(structure):
    """A string that is imported is an import which the contracts of layers do not see."""
    found = [f"{name} -> {said}" for name, said in structure.climbing_strings()]
    assert not found


def test_circles_of_modules_are_small(structure):
    assert not [circle for circle in structure.circles() if len(circle) > LARGEST_CIRCLE]


def test_ports_are_small():
    """A port has the methods that one kind of caller needs; an adapter may have several ports."""
    large = {f"{name}: {', '.join(methods)}" for name, methods in abstract_methods() if len(methods) > MOST_ABSTRACT}
    assert not large


def test_nothing_is_kept_from_the_formatter():
    kept = [path for path in (SNAPSHOTS.parents[1] / "src").rglob("*.py") if "# fmt: " in path.read_text()]
    assert not kept


def test_folders_are_small(structure):
    assert not {name: count for name, count in structure.folders().items() if count > LARGEST_FOLDER}


@pytest.mark.parametrize("file", [pytest.param(file, marks=pytest.mark.slow if file == "json-keys.txt" else ()) for file in TAKEN])
def test_what_users_see_is_what_was_written_down(file):
    kept = (SNAPSHOTS / file).read_text()
    changes = list(difflib.unified_diff(kept.splitlines(), TAKEN[file]().splitlines(), "kept", "now", lineterm="", n=0))
    assert not changes, "\n".join([f"wanted? then run `python tests/structure.py` and name it in CHANGELOG.md: {file}", *changes])


# -- the reader ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """A package of a few modules: `sources(path=text)` writes them."""

    def sources(**texts: str) -> Structure:
        folder = tmp_path / "house"
        for name, text in {"__init__": "", **texts}.items():
            path = folder / f"{name.replace('__init__', '@').replace('__', '/').replace('@', '__init__')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            (path.parent / "__init__.py").touch()
        return Structure(folder)

    return sources


def test_an_import_in_a_function_and_one_in_a_string_close_a_circle(small):
    texts = {
        "up": "def f():\n    from house.down import g",
        "down": "import importlib\ndef g():\n    return importlib.import_module('house.up').f",
    }
    read = small(**texts)
    assert read.circles() == [["house.down", "house.up"]]
    assert read.climbing_strings() == [("house.down", "house.up")]
    assert read.climbing_strings({"house.down": "a registry"}) == []


def test_what_is_for_type_checkers_or_readers_is_no_import(small):
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.down import g"
    read = small(up=checked, down="'house.up'\nfrom house.up import f")
    assert read.circles() == []
    assert read.climbing_strings() == []


def test_each_module_of_a_list_in_a_string_is_found(small):
    read = small(up="NAMES = 'json,house.down:f'", down="")
    assert read.climbing_strings() == [("house.up", "house.down:f")]


def test_a_lazy_name_leads_to_its_module(small):
    lazy = "_LAZY = {'f': 'deep'}\ndef __getattr__(name): ..."
    texts = {"room____init__": lazy, "room__deep": "from house.user import g", "user": "from house.room import f"}
    read = small(**texts)
    assert read.circles() == [["house.room.deep", "house.user"]]
    assert read.folders() == {"house": 2, "house.room": 2}


def test_abstract_methods_of_a_class_are_its_own(tmp_path):
    text = "class A(ABC):\n    @abstractmethod\n    def f(self): ...\n    @property\n    @abc.abstractmethod\n    def g(self): ...\nclass B(A):\n    def h(self): ..."
    (tmp_path / "m.py").write_text(text)
    assert dict(abstract_methods(tmp_path)) == {"A": ["f", "g"], "B": []}


def test_keys_of_documents():
    document = {"a": [{"b": 1}, {"c": {"s3://x": {"d": 2}}}]}
    assert sorted(set(keys(document))) == ["a", "a[].b", "a[].c", "a[].c.*", "a[].c.*.d"]


def test_registries_exist(structure):
    assert set(REGISTRIES) <= set(structure.modules)
