"""Bounds of options: those that the types of the fields have which the options are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ephemeron.config.typed import convert


def bounded(hint: Any) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback for an option that refuses values out of the bounds of an annotated type such as `Positive`.

    The callback raises `JobError`, one line that names the option.
    """

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        return None if value is None else convert(hint, value, param.opts[0])

    return check
