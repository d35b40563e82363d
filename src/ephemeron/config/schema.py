"""JSON Schema (draft 2020-12) of the dataclasses that `ephemeron.config.typed` reads, for editors.

Types give types, `Annotated` bounds give bounds, and the docstring under a field gives its description. A schema accepts what
the reader accepts. It accepts more where JSON Schema cannot say what the reader checks: infinity, keys that exclude each
other, files that have to exist, and whole numbers beyond 2**53 where any number may be.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, cast, get_args, get_origin, get_type_hints

from ephemeron.config.typed import LARGEST, Bound, Form, Partial, plain, shorthand

Schema: TypeAlias = dict[str, object]

_SCALARS: dict[object, Schema] = {
    int: {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": "string"},
    Path: {"type": "string"},
    Any: {},
    object: {},
}


def schema_of(cls: type, *, title: str, optional: Sequence[str] = (), allow_schema_key: bool = True) -> Schema:
    """Schema of a document that holds one value of a dataclass.

    Args:
        cls: the dataclass.
        title: of the document.
        optional: required fields that the document may leave out.
        allow_schema_key: whether the document may name its schema under `$schema`.
    """
    made: dict[str, Schema] = {}
    top = _table(cls, made)
    required = [name for name in cast("list[str]", top.get("required", [])) if name not in optional]
    properties = cast("Schema", top["properties"])
    if allow_schema_key:
        properties = {"$schema": {"type": "string"}, **properties}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **top,
        "required": required,
        "properties": properties,
        "$defs": {name: made[name] for name in sorted(made)},
    }


def _of(hint: Any, made: dict[str, Schema]) -> Schema:
    """Schema of a type; those of dataclasses go into `made`, by name."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, *limits = args
        schema = _of(kind, made)
        for limit in limits:
            schema = {**schema, **_limit(limit, made)}
        return schema
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if o is type(None) else _of(o, made) for o in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (tuple, list, Sequence, frozenset):
        return {"type": "array", "items": _of(args[0], made)}
    if origin in (dict, Mapping):
        inner = _of(args[1], made)
        return {"type": "object", **({"additionalProperties": inner} if inner else {})}
    if dataclasses.is_dataclass(hint):
        return _reference(cast("type[Any]", hint), made)
    return dict(_SCALARS[hint])


def _limit(limit: object, made: dict[str, Schema]) -> Schema:
    if isinstance(limit, Bound):
        found: Schema = {"exclusiveMinimum" if limit.open_minimum else "minimum": limit.minimum}
        if limit.maximum < sys.float_info.max:
            found["exclusiveMaximum" if limit.open_maximum else "maximum"] = limit.maximum
        return found
    if isinstance(limit, Form):
        return {"pattern": f"^({limit.pattern.pattern})$"}
    if isinstance(limit, Partial):
        return {"properties": _table(limit.cls, made)["properties"], "additionalProperties": False}
    return {}


def _reference(cls: type[Any], made: dict[str, Schema]) -> Schema:
    name = cls.__name__
    if name not in made:
        made[name] = {}  # for types that hold themselves
        made[name] = _table(cls, made)
    reference: Schema = {"$ref": f"#/$defs/{name}"}
    short = shorthand(cls)
    if short is not None:
        field = cast("dict[str, Schema]", made[name].get("properties", {})).get(short, {})
        text = {"type": "string", **field, "description": f"short for {{ {short} = … }}"}
        return {"anyOf": [text, reference]}
    return reference


def _table(cls: type[Any], made: dict[str, Schema]) -> Schema:
    """Schema of a dataclass as a table."""
    hints, texts = get_type_hints(cls, include_extras=True), descriptions(cls)
    properties: Schema = {}
    required = []
    for f in dataclasses.fields(cls):
        schema = _of(hints[f.name], made)
        if f.name in texts:
            schema["description"] = texts[f.name]
        if f.default is not dataclasses.MISSING and f.default is not None:
            schema["default"] = plain(f.default)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
        properties[f.name] = schema
    return {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0],
        "properties": properties,
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def descriptions(cls: type[Any]) -> Mapping[str, str]:
    """Docstrings under the fields of a class and its bases, by field."""
    bases = [base for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    found: dict[str, str] = {name: text for base in bases for name, text in descriptions(base).items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    for field, text in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = " ".join(text.value.value.split())
    return found
