"""Bounds of options: those that the types of the fields have which the options are for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from ephemeron.config.typed import convert
from ephemeron.errors import JobError
from ephemeron.runs.labels import parse_labels


def bounded(hint: Any) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback for an option that refuses values out of the bounds of an annotated type such as `Positive`.

    The callback raises `JobError`, one line that names the option.
    """

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        return None if value is None else convert(hint, value, param.opts[0])

    return check


def read_labels(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    """A callback for options of the form `NAME=VALUE`; see `parse_labels`."""
    return parse_labels(value)


label_option = click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="NAME=VALUE",
    callback=read_labels,
    help="Label by which the run is found, and its cost told apart (repeatable).",
)
requirements_option = click.option(
    "--requirements",
    metavar="FILE",
    help="Packages that functions have beside those installed here: a requirements.txt, uv.lock, pylock.toml or pyproject.toml. Installed once; a "
    "deployment has to have them.  [default: the one beside the module, if that imports what is not installed]",
)
wanted_labels_option = click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", callback=read_labels, help="List only runs with this label (repeatable)."
)


def target(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, object] | None:
    """A callback for an option of the form `NAME:OPTION=VALUE,…`: a `Target` as in a job file. Values are JSON, or text.

    Raises:
        JobError: an option without a value.
    """
    if value is None:
        return None
    name, _, rest = value.partition(":")
    options: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if not equals:
            raise JobError(f"{param.opts[0]} {value}: {key} has no value", remedy="write NAME:option=value,option=value")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return {"target": name, "options": options}


def code_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that send code of the user's."""
    for option, help in (
        (
            "--code-exclude",
            "Files or folders that are not sent with the code, such as 'notes/' (repeatable); `.ephemeronignore` lists them, too.",
        ),
        ("--code-include", "Files that are sent in any case, such as 'lookup.csv' or '*.parquet' (repeatable)."),
    ):
        command = click.option(option, multiple=True, metavar="PATTERN", help=help)(command)
    return command
