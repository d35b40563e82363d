"""TOML text as tables, where every mistake is one line that names its place; and tables as TOML text."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from ephemeron.errors import JobError


def parse_toml(text: str, *, where: str, remedy: str = "") -> dict[str, Any]:
    """The table in a TOML text.

    Raises:
        JobError: malformed, nested too deep, or with a number of thousands of digits.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise JobError(f"{where} is not valid TOML: brackets are nested too deep", remedy=remedy) from None
    except ValueError as e:  # tomllib's own, and Python's of integers that are too long
        raise JobError(f"{where} is not valid TOML: {str(e).partition(';')[0]}", remedy=remedy) from None


def toml_text(table: Mapping[str, Any]) -> str:
    """A table as TOML text: values first, then the tables and lists of tables in it, in which everything is inline. None is left out."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None and not isinstance(v, Mapping) and not _are_tables(v)]
    for name, inner in table.items():
        if isinstance(inner, Mapping):
            lines += ["", f"[{_key(name)}]", *_values(inner)]
        elif _are_tables(inner):
            for each in inner:
                lines += ["", f"[[{_key(name)}]]", *_values(each)]
    return "\n".join(lines).lstrip("\n") + "\n"


def _are_tables(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _values(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    """A value in one line.

    Raises:
        TypeError: TOML has no such value.
    """
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    raise TypeError(f"TOML has no {type(value).__name__}")
