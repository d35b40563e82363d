"""What every reader needs: its options checked, its path checked, its errors told in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ephemeron.errors import JobError
from ephemeron.job.spec import DataSpec


def read_options(spec: DataSpec, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a source, defaults filled in. A default of None means: optional text.

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
    """`data.path`, which exists.

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


def near(name: str, known: Iterable[str], *, what: str = "known names") -> str:
    """A remedy: the nearest names, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"{what}: {', '.join(names)}" if names else f"{what}: none"


def one_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":") if lines else type(error).__name__
