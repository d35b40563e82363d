"""`ephemeron clean runs`: deletes what runs have left in their channels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.table import Table

from ephemeron.cli.terminal import make_console
from ephemeron.errors import ChannelError, UserError
from ephemeron.units import human_bytes, human_count

if TYPE_CHECKING:
    from ephemeron.training.driver.cleanup import RemainingObjects


@click.command("runs")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--all", "everything", is_flag=True, help="All runs of the home folder, but those that run.")
@click.option("--folder", is_flag=True, help="Also the runs' folders: events, results, weights and reports.")
@click.option("--force", is_flag=True, help="Also runs that may be at work on a cloud: their functions will fail.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clean_runs(runs: tuple[str, ...], everything: bool, folder: bool, force: bool, yes: bool) -> None:
    """Delete the objects that RUNs have left in their channels.

    \b
    ephemeron clean runs last                   one run's objects
    ephemeron clean runs --all --folder         everything of all runs that do not run

    Lists them first, with sizes, and asks. Weights, results and reports are in the run's folder, not in the channel; a run
    that was stopped or has failed can no longer be resumed. Channels on a parameter server have ended with their run.
    """
    from ephemeron.training.driver import cleanup, run_dir
    from ephemeron.training.driver.run_status import may_live, standing

    if bool(runs) == everything:
        raise UserError("say which runs: RUN..., or --all")
    folders = (
        run_dir.all_runs() if everything else list({(found := run_dir.find(run)).path: found for run in runs}.values())
    )
    if everything and not force:
        folders = [found for found in folders if not may_live(standing(found))]
    left = cleanup.left_by(folders, force=force)
    wanted = [one for one in left if one.keys or one.problem or folder]
    if not wanted:
        click.echo(f"nothing is left in the channels of {human_count(len(left), 'run')}")
        return
    _show(wanted, folder=folder)
    objects, nbytes = sum(len(one.keys) for one in wanted), sum(one.nbytes for one in wanted)
    what = f"{human_count(objects, 'object')} ({human_bytes(nbytes)})"
    if folder:
        total = sum(one.folder_bytes for one in wanted)
        what += f" and {human_count(len(wanted), 'folder')} with results ({human_bytes(total)})"
    if lost := sum(one.resumable for one in wanted):
        click.echo(f"{human_count(lost, 'run')} of these could still be resumed, and no longer afterwards")
    if not yes:
        click.confirm(f"delete {what}?", abort=True)
    problems = [f"{one.folder.run_id}: {one.problem}" for one in wanted if one.problem]
    for one in wanted:
        if one.problem:
            continue  # its folder says where its objects are: it stays
        try:
            cleanup.remove(one, folder=folder)
        except ChannelError as e:
            problems.append(f"{one.folder.run_id}: {e}")
    if problems:
        for problem in problems:
            click.secho(f"error: not deleted: {problem}", fg="red", err=True)
        sys.exit(1)
    click.echo(f"deleted {what}")


def _show(left: Sequence[RemainingObjects], *, folder: bool) -> None:
    table = Table(
        "run", "status", "channel", "objects", "size", *(["folder"] if folder else []), box=None, pad_edge=False
    )
    for one in left:
        row = [one.folder.run_id, one.status, one.address or "none", str(len(one.keys)), human_bytes(one.nbytes)]
        if one.problem:
            row[3:] = ["?", "?"]
        table.add_row(*row, *([human_bytes(one.folder_bytes)] if folder else []))
    make_console(piped_width=160).print(table)
