"""Durable maps: a Python function with each of many items, on functions; every result is recorded once and paid for once.

    sources          items as users have them, with keys
    code_version     what can change a result
    result_table     rows of results in a folder or a bucket
    outputs          files and objects beside it
    durable          the map itself: `map_items`

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.maps.durable import MapResult, map_items

_HOME = {"MapResult": "durable", "map_items": "durable"}

__all__ = ["MapResult", "map_items"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
