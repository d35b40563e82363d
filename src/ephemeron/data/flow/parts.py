"""Data and target of a sample of any shape: a tuple, a list, a dict, a dataclass, or a single value.

| sample | data | target | with `key` |
|---|---|---|---|
| tuple, list, named tuple | its first part | its last part, of at least two | a place, or a field's name |
| dataclass | its first field | its last field, of at least two | a field's name |
| mapping | only with `key` | only with `key` | a key |
| anything else (array, tensor, text, image) | all of it | none | none |

The other parts of a sample are unchanged, and the sample keeps its type.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Key: TypeAlias = str | int | None
Role: TypeAlias = Literal["data", "target"]


def part_of(sample: Any, role: Role, key: Key) -> Any:
    """The data or the target of a sample, or the part that `key` names.

    Raises:
        ValueError: the sample has no such part; the message lists its parts.
    """
    place = _place(sample, role, key)
    if place is None:
        return sample
    return getattr(sample, place) if _has_fields(sample) and isinstance(place, str) else sample[place]


def with_part(sample: Any, role: Role, key: Key, value: Any) -> Any:
    """A copy of the sample with another value for that role or key; the given sample is unchanged.

    Raises:
        ValueError: the sample has no such part.
    """
    place = _place(sample, role, key)
    if place is None:
        return value
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        return dataclasses.replace(sample, **{str(place): value})
    if isinstance(sample, tuple):
        named: Any = sample
        parts = list(sample)
        parts[named._fields.index(place) if isinstance(place, str) else place] = value
        return named._make(parts) if hasattr(named, "_make") else tuple(parts)
    other: Any = copy.copy(sample)
    other[place] = value
    return other


def _place(sample: Any, role: Role, key: Key) -> Any:
    """Place of the part; None: it is the whole sample."""
    if isinstance(sample, Mapping):
        return _key_of(sample, role, key)
    if dataclasses.is_dataclass(sample):
        return _field_of(sample, [field.name for field in dataclasses.fields(sample)], role, key)
    if isinstance(sample, tuple | list):
        names = list(getattr(sample, "_fields", ()))
        if isinstance(key, str):
            return _field_of(sample, names, role, key)
        return _number_of(sample, role, key)
    if key is not None or role == "target":
        what = "target" if key is None else f"part {key!r}"
        raise ValueError(f"the sample is a single {type(sample).__name__} and has no {what}: map it whole with map or map_data")
    return None


def _key_of(sample: Mapping[Any, Any], role: Role, key: Key) -> Any:
    keys = ", ".join(map(repr, sample))
    if key is None:
        raise ValueError(f"the sample is a {type(sample).__name__} with the keys {keys}: say which with map_{role}(..., key=...)")
    if key not in sample:
        raise ValueError(f"the sample has no key {key!r} but {keys}")
    return key


def _field_of(sample: Any, names: list[str], role: Role, key: Key) -> str:
    if key is None:
        _enough(len(names), sample, role)
        return names[0 if role == "data" else -1]
    if key not in names:
        raise ValueError(f"the sample, a {type(sample).__name__}, has no field {key!r} but {', '.join(names) or 'none'}")
    return str(key)


def _number_of(sample: Any, role: Role, key: int | None) -> int:
    if key is None:
        _enough(len(sample), sample, role)
        return 0 if role == "data" else len(sample) - 1
    if not -len(sample) <= key < len(sample):
        raise ValueError(f"the sample, a {type(sample).__name__} of {len(sample)}, has no part {key}")
    return key % len(sample)


def _enough(parts: int, sample: Any, role: Role) -> None:
    if parts < (1 if role == "data" else 2):
        raise ValueError(f"the sample, a {type(sample).__name__} of {parts}, has no {role}")


def _has_fields(sample: Any) -> bool:
    return dataclasses.is_dataclass(sample) or hasattr(sample, "_fields")
