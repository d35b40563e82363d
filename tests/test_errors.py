"""All public errors are in one module, and its drawn tree is the tree of classes."""

from __future__ import annotations

import inspect
import re

from ephemeron import errors

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
    assert {name: c.__bases__[0].__name__ for name, c in CLASSES.items() if name != "EphemeronError"} == drawn() | {
        "DamagedObject": "ChannelTimeout"
    }
