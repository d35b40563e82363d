"""Checks that every reader makes: of its options and of its path."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ephemeron.config.typed import build
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError

Options = TypeVar("Options", bound=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """Options of a source that takes none."""


def read_options(spec: DataSpec, cls: type[Options]) -> Options:
    """The options of a source.

    Args:
        spec: of the job's data.
        cls: dataclass of the source's options.

    Raises:
        JobError: an option is unknown or has another type.
    """
    if spec.options and not fields(cls):
        raise JobError(f"source {spec.source!r} takes no options, but has {', '.join(spec.options)}")
    return build(cls, spec.options, where="data.options")


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
