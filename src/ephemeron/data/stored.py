"""Stored states of this package's own state machines: dataclasses whose keys are checked when they are read.

Values are not checked one by one: they are long lists of numbers, and seeds may be any integer, which `config.typed` refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ephemeron.errors import JobError

T = TypeVar("T")


def restore(cls: Callable[..., T], raw: object, *, where: str) -> T:
    """A dataclass from the mapping of its fields.

    Raises:
        JobError: not a mapping, or a key is unknown or missing.
    """
    if not isinstance(raw, Mapping):
        raise JobError(f"{where}: expected a table, got {type(raw).__name__}")
    try:
        return cls(**raw)
    except TypeError as e:
        raise JobError(f"{where}: {e}", remedy="load a result of state_dict(), unchanged") from None


def document(state: Any) -> dict[str, object]:
    """The inverse of `restore`: the fields of a dataclass and of those in it. Lists of numbers are not copied."""
    return {field.name: _written(getattr(state, field.name)) for field in dataclasses.fields(state)}


def _written(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return document(value)
    if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
        return [document(each) for each in value]
    return value
