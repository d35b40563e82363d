"""`ephemeron runs`: the table of runs, and `runs clean`: deletion of what runs have left in their channels."""

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


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.pass_context
def runs(ctx: click.Context, as_json: bool) -> None:
    """List runs, newest first.

    \b
    ephemeron runs
    ephemeron runs clean last                   delete the objects that the newest run has left in its channel
    """
    if ctx.invoked_subcommand is None:
        from ephemeron.cli.listing import print_runs

        print_runs(as_json=as_json)


@runs.command("clean")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--all", "everything", is_flag=True, help="All runs of the home folder that are not running.")
@click.option("--folder", is_flag=True, help="Delete the runs' folders too: events, results, weights and reports.")
@click.option(
    "--force", is_flag=True, help="Include runs that may still be running on a cloud: their functions will fail."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clean_runs(runs: tuple[str, ...], everything: bool, folder: bool, force: bool, yes: bool) -> None:
    """Delete the objects that runs have left in their channels.

    \b
    ephemeron runs clean last                   objects of the newest run
    ephemeron runs clean --all --folder         objects and folders of all runs that are not running

    Lists the objects with their sizes, then asks. Weights, results and reports are in the run's folder, not in the channel.
    A run that was stopped or has failed cannot be resumed afterwards. Channels on a parameter server end with their run.
    """
    from ephemeron.training.driver import cleanup, run_dir
    from ephemeron.training.driver.run_status import may_be_running, status_of

    if bool(runs) == everything:
        raise UserError("say which runs: RUN..., or --all")
    folders = (
        run_dir.all_runs() if everything else list({(found := run_dir.find(run)).path: found for run in runs}.values())
    )
    if everything and not force:
        folders = [found for found in folders if not may_be_running(status_of(found))]
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
            continue  # its folder has the address of its objects, so it is kept
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
