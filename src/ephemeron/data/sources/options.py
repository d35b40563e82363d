"""Checks of options and path that all readers share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError


def read_options(spec: DataSpec, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a source, with defaults filled in. A default of None means: optional text.

    Raises:
        JobError: an option is unknown or has the wrong type.
    """
    for name, value in spec.options.items():
        if name not in defaults:
            known = f"known options: {', '.join(defaults)}" if defaults else "it takes none"
            raise JobError(f"source {spec.source!r} has no option {name!r}", remedy=known)
        kind = str if defaults[name] is None else type(defaults[name])
        if not isinstance(value, kind):
            wanted = {bool: "true or false", str: "text"}[kind]
            raise JobError(f"data.options.{name} = {value!r} should be {wanted}")
    return {**defaults, **spec.options}


def need_path(spec: DataSpec, what: str) -> Path:
    """`data.path`, which is checked to exist.

    Args:
        what: what the path should name, for the message.

    Raises:
        JobError: it is not given or does not exist.
    """
    if spec.path is None:
        raise JobError(f"source {spec.source!r} needs data.path", remedy=f"give {what}")
    if not spec.path.exists():
        raise JobError(f"data.path = {str(spec.path)!r} does not exist", remedy=f"give {what}")
    return spec.path
