"""Calls of functions that a job names, with errors that name the user's own line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ephemeron.config.typed import near
from ephemeron.errors import EphemeronError, JobError
from ephemeron.user_code import guarded, where_raised


def call(target: str, function: Any, options: Mapping[str, object], code: Sequence[Path]) -> Any:
    """The result of a function of the user.

    Raises:
        JobError: it is not callable, does not take these options, or raises.
    """
    if not callable(function):
        raise JobError(f"{target} is not callable but {type(function).__name__}", remedy="name a function")
    _check_options(target, function, options)
    try:
        with guarded():
            return function(**options)
    except EphemeronError:
        raise
    except Exception as e:
        raise JobError(f"{target} raised {where_raised(e, code)}") from e


def _check_options(target: str, function: Callable[..., Any], options: Mapping[str, object]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-ins have none
        return
    try:
        signature.bind(**options)
    except TypeError as e:
        known = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        unknown = next((name for name in options if name not in known), "")
        raise JobError(f"{target}: {e}", remedy=near(unknown, known, what="it takes")) from None
