"""`-v` and `--log-level` on every command."""

from __future__ import annotations

import os

import click

from ephemeron import logs
from ephemeron.errors import JobError


def _set_level(ctx: click.Context, param: click.Parameter, value: str | int | None) -> None:
    level = {0: None, 1: "info"}.get(value, "debug") if isinstance(value, int) else value
    if level is not None:
        os.environ[logs.LEVEL_VARIABLE] = level  # functions on this machine inherit it
    try:
        logs.configure(level)
    except JobError as e:
        raise click.UsageError(str(e)) from e


def add_log_options(command: click.Command) -> None:
    """Adds both options to a command and to all commands of a group."""
    command.params += [
        click.Option(
            ["-v", "--verbose"],
            count=True,
            expose_value=False,
            callback=_set_level,
            help="Log what happens on standard error (-vv: each iteration, too).",
        ),
        click.Option(
            ["--log-level"],
            type=click.Choice(logs.LEVELS),
            expose_value=False,
            callback=_set_level,
            help="Least severe records to log; also $EPHEMERON_LOG_LEVEL.  [default: warning]",
        ),
    ]
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            add_log_options(inner)
