"""All public errors are in one module, and its drawn tree is the tree of classes."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import ephemeron
from ephemeron import errors

ROOT = Path(ephemeron.__file__).parent
CLASSES = {name: c for name, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, BaseException)}


def drawn():
    """Class → parent, as the module's docstring draws them."""
    parents, path = {}, ["EphemeronError"]
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"    ([│ ]*)[├└]── (\w+)", line):
            depth = len(found[1]) // 4 + 1
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1]
    return parents


def test_the_drawn_tree_is_the_tree_of_classes():
    assert {name: c.__bases__[0].__name__ for name, c in CLASSES.items() if name != "EphemeronError"} == drawn()


def test_no_other_module_adds_to_the_tree():
    """Private classes may: they do not leave their module. Control flow is a plain `Exception`, and no error."""
    elsewhere, derived = [], re.compile(rf"class \w+\([^)]*\b(?:{'|'.join(CLASSES)})\b")
    for file in ROOT.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if derived.search(text) else ():
            if file != ROOT / "errors.py" and isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {b.id for b in node.bases if isinstance(b, ast.Name)}
                if bases & set(CLASSES):
                    elsewhere.append(f"{file.relative_to(ROOT)}: {node.name}")
    assert elsewhere == []
