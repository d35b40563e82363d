"""Values from outside, checked against the types of a dataclass: every mistake is one line that names place and value.

One reader serves TOML, JSON and Python. Types say what a value may be; `Annotated` adds bounds:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Limits:
        workers: Annotated[int, AtLeast(1)]
        budget_usd: Annotated[float, MoreThan(0)] | None = None
        accuracy: Annotated[float, Within(0, 1)] = 1.0

NaN is refused everywhere, infinity wherever a bound excludes it (all bounds exclude it, unless `infinite=True`).
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from ephemeron.errors import JobError

LARGEST = 2**53
"""Whole numbers beyond it are mistakes, and not every format holds them."""

_shown = reprlib.Repr().repr


class Bound:
    """Bounds of a number. `phrase` completes "should be …"."""

    __slots__ = ("maximum", "minimum", "open_maximum", "open_minimum", "phrase")

    def __init__(self, phrase: str, minimum: float, maximum: float, *, open_minimum: bool = False, open_maximum: bool = False) -> None:
        self.phrase = phrase
        self.minimum = minimum
        self.maximum = maximum
        self.open_minimum = open_minimum
        self.open_maximum = open_maximum

    def holds(self, value: float) -> bool:
        """Whether a number is within the bound."""
        above = value > self.minimum if self.open_minimum else value >= self.minimum
        return above and (value < self.maximum if self.open_maximum else value <= self.maximum)


def AtLeast(minimum: float, *, infinite: bool = False) -> Bound:
    """A bound from below that includes the minimum."""
    return Bound(f"at least {minimum:g}", minimum, math.inf if infinite else sys.float_info.max)


def MoreThan(minimum: float, *, infinite: bool = False) -> Bound:
    """A bound from below that excludes the minimum."""
    return Bound(f"more than {minimum:g}", minimum, math.inf if infinite else sys.float_info.max, open_minimum=True)


def Within(minimum: float, maximum: float, *, open_maximum: bool = False) -> Bound:
    """Bounds from both sides. The minimum is included, and so is the maximum unless `open_maximum`."""
    to = "to below" if open_maximum else "to"
    return Bound(f"from {minimum:.10g} {to} {maximum:.10g}", minimum, maximum, open_maximum=open_maximum)


class Form:
    """Shape of a text. `phrase` completes "use …"."""

    __slots__ = ("pattern", "phrase")

    def __init__(self, pattern: str, phrase: str) -> None:
        self.pattern = re.compile(pattern)
        self.phrase = phrase


class Partial:
    """A table with some of the keys of a dataclass, checked as that dataclass is and kept as a mapping, and so are tables in it."""

    __slots__ = ("cls",)

    def __init__(self, cls: type) -> None:
        self.cls = cls


Positive: TypeAlias = Annotated[float, MoreThan(0)]
NonNegative: TypeAlias = Annotated[float, AtLeast(0)]
Count: TypeAlias = Annotated[int, AtLeast(1)]
"""Number of things of which there is at least one: workers, epochs, samples."""


class Typed:
    """Base of frozen dataclasses that users build themselves: fields are converted as those of a TOML file are.

    A string is accepted for a `Path`, and `"module:function"` for a `Target`. Other values of another type are refused.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        name = type(self).__name__
        for key, hint in _hints(type(self)).items():
            value = getattr(self, key)
            converted = convert(hint, value, f"{name}: {key}")
            if converted is not value:
                object.__setattr__(self, key, converted)


T = TypeVar("T")


def build(cls: type[T], raw: Any, *, where: str) -> T:
    """A frozen dataclass from a mapping, strictly.

    Args:
        cls: the dataclass.
        raw: the mapping.
        where: prefix of messages, such as the name of a file; the path of the value follows, as in `job.toml: limits.deadline_s`.

    Raises:
        JobError: unknown or missing key, wrong type, or out of bounds.
    """
    return _build(cls, raw, where, ": ")


def _build(cls: type[T], raw: Any, where: str, separator: str) -> T:
    if not isinstance(raw, Mapping):
        if callable(raw):
            name = getattr(raw, "__qualname__", type(raw).__name__)
            raise JobError(f"{where} is the object {name}", remedy="name it: 'module:function', in a file beside the job")
        raise JobError(f"{where}: expected a table, got {_shown(raw)}")
    values = _values(cls, raw, where, separator)
    for f in dataclasses.fields(typing.cast("type[Any]", cls)):
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise JobError(f"{where}: missing key {f.name}")
    return cls(**values)


def _values(cls: type[Any], raw: Mapping[str, Any], where: str, separator: str, *, partial: bool = False) -> dict[str, Any]:
    """Values of the keys that are given, each as its type has it; if `partial`, tables that may be empty as mappings, too."""
    hints = _hints(cls)
    for key in raw:
        if key not in hints:
            raise JobError(f"{where}: unknown key {key}", remedy=suggest(key, cls))
    found = {}
    for key, value in raw.items():
        hint, place = hints[key], f"{where}{separator}{key}"
        kept = partial and isinstance(value, Mapping) and _may_be_empty(hint)
        found[key] = _values(hint, value, place, ".", partial=True) if kept else convert(hint, value, place)
    return found


def _may_be_empty(hint: Any) -> bool:
    """Whether a type is a dataclass whose fields all have defaults."""
    missing = dataclasses.MISSING
    return dataclasses.is_dataclass(hint) and all(
        f.default is not missing or f.default_factory is not missing for f in dataclasses.fields(hint)
    )


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type[Any]) -> dict[str, Any]:
    if cls not in _HINTS:
        hints = get_type_hints(cls, include_extras=True)
        _HINTS[cls] = {f.name: hints[f.name] for f in dataclasses.fields(cls)}
    return _HINTS[cls]


def convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as `hint` has it: whole numbers as floats, lists as tuples, text as paths, mappings as dataclasses.

    Raises:
        JobError: it is of another type, no number, or too large a one.
    """
    if hint in (str, int, float, bool):  # most values: messages between processes are read this way, too
        return _scalar(hint, value, where)
    if hint is Any or hint is object:
        return value
    origin = get_origin(hint)
    if origin is Annotated:
        kind, *bounds = get_args(hint)
        value = convert(kind, value, where)
        for bound in bounds:
            if isinstance(bound, Bound) and not bound.holds(value):
                raise JobError(f"{where} = {_shown(value)} should be {bound.phrase}")
            if isinstance(bound, Form) and bound.pattern.fullmatch(value) is None:
                raise JobError(f"{where} = {_shown(value)} is not known", remedy=f"use {bound.phrase}")
            if isinstance(bound, Partial):
                value = _values(bound.cls, value, where, ".", partial=True)
        return value
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if value is None and type(None) in options:
            return None
        return _any_of([o for o in options if o is not type(None)], value, where)
    if origin is Literal:
        if value not in get_args(hint):
            raise JobError(f"{where} = {_shown(value)} is not known", remedy=f"use one of {', '.join(map(str, get_args(hint)))}")
        return value
    if origin in (tuple, list, Sequence, frozenset):
        if not isinstance(value, (list, tuple, frozenset)):
            raise JobError(f"{where} = {_shown(value)} should be a list")
        return _sequence(origin, get_args(hint), value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise JobError(f"{where} = {_shown(value)} should be a table")
        key, inner = get_args(hint)
        return {_key(key, k, where): convert(inner, v, f"{where}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast("type[Any]", hint)):
            return value
        short = shorthand(typing.cast("type[Any]", hint))
        if isinstance(value, str) and short is not None:
            value = {short: value}  # model = "models:cnn" is short for {target = "models:cnn"}
        return _build(typing.cast("type[Any]", hint), value, where, ".")
    return _scalar(hint, value, where)


def shorthand(cls: type[Any]) -> str | None:
    """The field of a dataclass that a text stands for: `target` if it has one, or what its `SHORTHAND` names."""
    if "target" in {f.name for f in dataclasses.fields(cls)}:
        return "target"
    return getattr(cls, "SHORTHAND", None)


def _any_of(options: Sequence[Any], value: Any, where: str) -> Any:
    """`value` as the first of several types that takes it. With one type, its own message is the error."""
    if len(options) == 1:
        return convert(options[0], value, where)
    if type(value) in options:
        return convert(type(value), value, where)
    if isinstance(value, Mapping):  # a table is of the form that has its keys, so that a wrong value is named by that form
        forms = [o for o in options if dataclasses.is_dataclass(o) and _hints(typing.cast("type[Any]", o)).keys() >= value.keys()]
        if len(forms) == 1:
            return convert(forms[0], value, where)
        if not forms and all(dataclasses.is_dataclass(o) for o in options):
            known = " or ".join("{" + ", ".join(_hints(typing.cast("type[Any]", o))) + "}" for o in options)
            raise JobError(f"{where} has {{{', '.join(map(str, value))}}}", remedy=f"give {known}")
    if isinstance(value, (list, tuple)):  # of which an entry is wrong rather than the whole
        sequences = [o for o in options if get_origin(o) in (tuple, list)]
        if len(sequences) == 1:
            return convert(sequences[0], value, where)
    problems: list[JobError] = []
    for option in options:
        try:
            return convert(option, value, where)
        except JobError as e:
            problems.append(e)
    if isinstance(value, Mapping):
        raise problems[-1]
    raise JobError(f"{where} = {_shown(value)} should be {' or '.join(_name(o) for o in options)}")


def _sequence(origin: Any, args: tuple[Any, ...], value: Iterable[Any], where: str) -> Any:
    values = list(value)
    if (origin is tuple and len(args) != 2) or (origin is tuple and args[1] is not Ellipsis):
        if len(values) != len(args):
            raise JobError(f"{where} = {_shown(value)} should have {len(args)} values")
        return tuple(convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, values, strict=True)))
    made = (convert(args[0], v, f"{where}[{i}]") for i, v in enumerate(values))
    return list(made) if origin is list else frozenset(made) if origin is frozenset else tuple(made)


def _key(hint: Any, key: Any, where: str) -> Any:
    """A key of a table: JSON and TOML have text only, so numbers are read from it."""
    if hint is int and isinstance(key, str):
        try:
            return int(key)
        except ValueError:
            raise JobError(f"{where}: key {_shown(key)} should be a whole number") from None
    return convert(hint, key, f"{where}: key")


def plain(value: Any) -> Any:
    """The inverse of `build`: dataclasses as dicts, tuples as lists, paths as text, ready for JSON and TOML."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, frozenset)):
        return [plain(v) for v in (sorted(value) if isinstance(value, frozenset) else value)]
    return str(value) if isinstance(value, Path) else value


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > LARGEST:
            raise JobError(f"{where} is a number of {len(str(abs(value)))} digits", remedy="give a smaller one")
        if hint is float:
            return float(value)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        unit = _unit(where) if isinstance(value, str) and hint in (int, float) else None
        raise JobError(f"{where} = {_shown(value)} should be {_name(hint)}", remedy=None if unit is None else f"give {unit}, as a number")
    if isinstance(value, float) and math.isnan(value):
        raise JobError(f"{where} = {value} is not a number")
    return value


def _name(hint: Any) -> str:
    if get_origin(hint) in (tuple, list):
        return "a list"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )


_UNITS = {"_s": "seconds", "_mb": "MB", "_usd": "US dollars", "_mb_s": "MB per second"}


def _unit(where: str) -> str | None:
    """The unit that a name ends in, for texts such as `"15 min"`."""
    return next((unit for suffix, unit in reversed(_UNITS.items()) if where.endswith(suffix)), None)


def suggest(key: str, cls: type) -> str:
    """A remedy for a key that a dataclass does not have: the table in it that has the key, the nearest key, or all of them."""
    names = [f.name for f in dataclasses.fields(cls)]
    inner = [name for name, hint in _hints(cls).items() if any(key in _hints(table) for table in _tables(hint))]
    if inner:
        return f"write it in {' or '.join(f'[{name}]' for name in inner)}"
    close = difflib.get_close_matches(key, names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    more = "; those of the target are in options" if {"target", "options"} <= set(names) else ""
    return f"known keys: {', '.join(names)}{more}"


def _tables(hint: Any) -> list[type[Any]]:
    """The dataclasses of which a value of this type is a table."""
    if dataclasses.is_dataclass(hint):
        return [typing.cast("type[Any]", hint)]
    if get_origin(hint) is Annotated:
        kind, *bounds = get_args(hint)
        return [bound.cls for bound in bounds if isinstance(bound, Partial)] or _tables(kind)
    if get_origin(hint) in (Union, types.UnionType):
        return [table for option in get_args(hint) for table in _tables(option)]
    return []


def near(name: str, known: Iterable[str], *, what: str = "known names", quoted: bool = False) -> str:
    """A remedy: the nearest names, or all of them."""
    names = sorted(known)
    most = 1 if quoted else 3
    close = difflib.get_close_matches(name, names, n=most) or [each for each in names if name and each.startswith(name)][:most]
    if close:
        return f"did you mean {' or '.join(map(repr, close) if quoted else close)}?"
    return f"{what}: {', '.join(names)}" if names else f"{what}: none"
