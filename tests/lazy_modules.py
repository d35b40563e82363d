"""Libraries that take seconds to import, imported by the first test that uses them: every process of a test run collects all tests."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class LazyModule:
    """A module that is imported when an attribute of it is first used.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks whether it is a test or a mock
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy_import(name: str, *, reason: str) -> Any:
    """A module for the tests of a file, which are skipped where its package is not installed.

    Args:
        name: of the module.
        reason: of the skip.
    """
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(reason, allow_module_level=True)
    return LazyModule(name)
