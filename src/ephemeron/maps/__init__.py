"""Durable maps: a Python function with each of many items, on functions; every result is recorded once and paid for once.

    sources          items as users have them, with keys
    code_version     what can change a result
    result_table     rows of results in a folder or a bucket
    outputs          files and objects beside it
    calls            how the function is called with an item
    computing        items without a row, on functions
    prediction       what it will take
    durable          the map itself: `map_items`
    map_result       how it has ended
    groups/          one model per group of a table
    partitions/      a table of Parquet files, part by part

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.maps.durable import map_items
    from ephemeron.maps.groups.fitting import fit_groups
    from ephemeron.maps.groups.models import GroupModels
    from ephemeron.maps.groups.predicting import predict_groups
    from ephemeron.maps.map_result import MapResult
    from ephemeron.maps.partitions.mapping import map_partitions

_HOME = {
    "GroupModels": "groups.models",
    "MapResult": "map_result",
    "fit_groups": "groups.fitting",
    "map_items": "durable",
    "map_partitions": "partitions.mapping",
    "predict_groups": "groups.predicting",
}

__all__ = ["GroupModels", "MapResult", "fit_groups", "map_items", "map_partitions", "predict_groups"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
