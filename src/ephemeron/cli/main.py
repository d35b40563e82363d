"""The command `ephemeron`: its sections, names that have changed, and exit codes.

Exit codes: 0 finished, 1 failed, 2 refused (a mistake in the request: nothing was started), 3 stopped and resumable. Modules
that are expensive to import are imported by the commands that need them, so that `--help` is fast.
"""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click

from ephemeron import logs
from ephemeron.blocking import terminable
from ephemeron.cli.cloud.commands import cloud
from ephemeron.cli.data import data
from ephemeron.cli.groups import fit_groups_command, predict_groups_command
from ephemeron.cli.linalg.commands import linalg
from ephemeron.cli.map import map_command, predict_command
from ephemeron.cli.map_partitions import map_partitions_command
from ephemeron.cli.partition.commands import partition
from ephemeron.cli.prepare import prepare_command
from ephemeron.cli.prices import prices
from ephemeron.cli.regions import regions
from ephemeron.cli.runs.commands import ARGUMENTS, runs
from ephemeron.cli.schema import schema
from ephemeron.cli.serve.commands import serve
from ephemeron.cli.starters import completion, init
from ephemeron.cli.training.plan import plan
from ephemeron.cli.training.profile import profile
from ephemeron.cli.training.train import train
from ephemeron.cli.training.tune import tune
from ephemeron.config.paths import home
from ephemeron.errors import EphemeronError, JobError, UserError

_log = logging.getLogger(__name__)

_VERBS = ("attach", "logs", "stop", "resume", "suspend", "resize", "report", "evaluate", "export")
"""Commands of `runs` that need no `runs` before them."""
SECTIONS: Mapping[str, Sequence[click.Command]] = {
    "Run": (
        init,
        train,
        plan,
        profile,
        tune,
        prepare_command,
        map_command,
        predict_command,
        map_partitions_command,
        fit_groups_command,
        predict_groups_command,
        linalg,
    ),
    "Runs": (runs, *(runs.commands[verb] for verb in _VERBS)),
    "Data and models": (data, partition, schema),
    "Platforms and services": (cloud, prices, regions, serve, completion),
}
RENAMED = {
    "clean": "cloud remove",
    "dashboard": "serve dashboard",
    "data serve": "serve data",
    "deploy": "cloud deploy",
    "doctor": "cloud check [PLATFORM]",
    "geo": "regions",
    "platforms": "cloud list",
    "rendezvous": "serve rendezvous",
    "sparse-store": "serve sparse",
    "workflow": "cloud workflow",
}
"""Commands that had another name before."""


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_LEAST_BYTES = 1 << 20
"""Room below which a disk is taken for full."""
_ROOM = "make room, or set EPHEMERON_HOME, TMPDIR or --out to folders with room"


class CommandGroup(click.Group):
    """Group of commands in sections, whose errors become one line and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        _end_without_collecting()
        try:
            with terminable():
                return super().invoke(ctx)
        except UserError as e:
            _log.debug("refused", exc_info=True)
            click.secho(f"error: {e}", fg="red", err=True)
            sys.exit(2)
        except EphemeronError as e:
            _log.debug("failed", exc_info=True)
            click.secho(f"error: {e}{_told_of_disk()}", fg="red", err=True)
            sys.exit(1)
        except OSError as e:
            if e.errno not in _UNWRITABLE:
                raise
            _log.debug("failed", exc_info=True)
            click.secho(f"error: {e.filename or 'a file'} cannot be written: {e.strerror}; {_ROOM}", fg="red", err=True)
            sys.exit(1)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        for length in (1, 2):
            old = " ".join(args[:length])
            if old in RENAMED:
                words = "".join(f" {word}" for word in self._subcommands(RENAMED[old], args[length:]))
                raise UserError(f"`ephemeron {old}{words}` is now `ephemeron {RENAMED[old]}{words}`")
        return super().resolve_command(ctx, args)

    def _subcommands(self, name: str, args: Sequence[str]) -> list[str]:
        """Those of the words that name commands below the command of that name."""
        command: click.Command = self
        found = []
        for word in [*name.split(), *args]:
            if not isinstance(command, click.Group) or word not in command.commands:
                break
            command = command.commands[word]
            found.append(word)
        return found[len(name.split()) :]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - 6 - max(len(name) for name in self.commands)
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(str(command.name), command.get_short_help_str(width)) for command in commands])


def _told_of_disk() -> str:
    """Says that the disk of the home folder is full, which functions that end by it cannot."""
    place = next((folder for folder in (home().absolute(), *home().absolute().parents) if folder.is_dir()), Path())
    return f"; the disk of {place} is full: {_ROOM}" if shutil.disk_usage(place).free < _LEAST_BYTES else ""


@cache
def _end_without_collecting() -> None:
    """Has this process end without a search for garbage, which takes half a second where PyTorch was imported."""
    atexit.register(gc.freeze)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="ephemeron")
def main() -> None:
    """Run machine learning on serverless functions.

    \b
    ephemeron train examples/digits/job.toml            train on this machine: functions are processes with quotas
    ephemeron plan examples/digits/job.toml             find the cheapest configuration, with a proof
    ephemeron map words:count --items a.jsonl --out b.jsonl      call a Python function for each item
    ephemeron train job.toml --platform aws --channel s3://bucket/prefix      the same on a cloud, see `ephemeron cloud`
    ephemeron logs last                                 output of the newest run; RUN is a name, its beginning, or `last`

    Runs are stored in ~/.ephemeron (or $EPHEMERON_HOME). `ephemeron resume RUN` continues a run that was stopped or whose
    functions were killed. `ephemeron COMMAND --help` has examples of each command.
    """


def _set_level(ctx: click.Context, param: click.Parameter, value: str | int | None) -> None:
    level = {0: None, 1: "info"}.get(value, "debug") if isinstance(value, int) else value
    if level is not None:
        os.environ[logs.LEVEL_VARIABLE] = level  # functions on this machine inherit it
    try:
        logs.configure(level)
    except JobError as e:
        raise click.UsageError(str(e)) from e


def _add_log_options(command: click.Command, done: set[int]) -> None:
    """Adds `-v` and `--log-level` to a command and to all commands of a group, once to each."""
    if id(command) in done:
        return
    done.add(id(command))
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
            _add_log_options(inner, done)


for _commands in SECTIONS.values():
    for _command in _commands:
        main.add_command(_command)
_add_log_options(main, set())


if __name__ == "__main__":
    main()
