"""Values from outside, checked against the types of a dataclass: every mistake is one line that names place and value."""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ephemeron.errors import JobError

LARGEST = 2**53
"""Whole numbers beyond it are mistakes, and not every format holds them."""

_shown = reprlib.Repr().repr


class Typed:
    """Base of frozen dataclasses that users build themselves: fields are converted as those of a TOML file are.

    A string stands for a `Path`, and `"module:function"` for a `Target`; whatever else has another type is refused.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        name = type(self).__name__
        for key, hint in _hints(type(self)).items():
            value = getattr(self, key)
            converted = convert(hint, value, f"{name}: {key}")
            if converted is not value:
                object.__setattr__(self, key, converted)


def build(cls: type[Any], raw: Any, *, where: str) -> Any:
    """A frozen dataclass from a mapping, strictly.

    Raises:
        JobError: unknown or missing key, or wrong type.
    """
    if not isinstance(raw, Mapping):
        if callable(raw):
            name = getattr(raw, "__qualname__", type(raw).__name__)
            raise JobError(
                f"{where} is the object {name}", remedy="name it: 'module:function', in a file beside the job"
            )
        raise JobError(f"{where}: expected a table, got {_shown(raw)}")
    hints = _hints(cls)
    for key in raw:
        if key not in hints:
            raise JobError(f"{where}: unknown key {key}", remedy=suggest(key, cls))
    values = {key: convert(hints[key], value, f"{where}: {key}") for key, value in raw.items()}
    for f in dataclasses.fields(cls):
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise JobError(f"{where}: missing key {f.name}")
    return cls(**values)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        hints = get_type_hints(cls)
        _HINTS[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    return _HINTS[cls]


def convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as `hint` has it: whole numbers as floats, lists as tuples, text as paths, mappings as dataclasses.

    Raises:
        JobError: it is of another type, no number, or too large a one.
    """
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        return convert(next(o for o in options if o is not type(None)), value, where)
    if origin is Literal:
        if value not in get_args(hint):
            raise JobError(
                f"{where} = {_shown(value)} is not known", remedy=f"use one of {', '.join(map(str, get_args(hint)))}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise JobError(f"{where} = {_shown(value)} should be a list")
        return tuple(convert(get_args(hint)[0], v, where) for v in value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise JobError(f"{where} = {_shown(value)} should be a table")
        inner = get_args(hint)[1]
        return {k: v if inner is Any else convert(inner, v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast("type[Any]", hint)):
            return value
        if isinstance(value, str) and "target" in {f.name for f in dataclasses.fields(hint)}:
            value = {"target": value}  # model = "models:cnn" is short for {target = "models:cnn"}
        return build(typing.cast("type[Any]", hint), value, where=where)
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > LARGEST:
            raise JobError(f"{where} is a number of {len(str(abs(value)))} digits", remedy="give a smaller one")
        if hint is float:
            return float(value)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise JobError(f"{where} = {_shown(value)} should be {_name(hint)}")
    if isinstance(value, float) and math.isnan(value):
        raise JobError(f"{where} = {value} is not a number")
    return value


def _name(hint: type) -> str:
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}.get(
        hint, hint.__name__
    )


def suggest(key: str, cls: type) -> str:
    """What may have been meant by a key that a dataclass does not have."""
    names = [f.name for f in dataclasses.fields(cls)]
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(names)}"


def near(name: str, known: Iterable[str], *, what: str = "known names") -> str:
    """A remedy: the nearest names, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"{what}: {', '.join(names)}" if names else f"{what}: none"
