"""`ephemeron runs clean`: deletion of what runs have left in their channels."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.table import Table

from ephemeron.cli.terminal import make_console
from ephemeron.errors import ChannelError, UserError
from ephemeron.units import human_bytes, human_count

if TYPE_CHECKING:
    from ephemeron.cli.runs.inventory import Item
    from ephemeron.runs.cleanup import RemainingObjects


@click.command("clean", short_help="Delete what runs have left in channels and on this machine.")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--all", "everything", is_flag=True, help="All runs of the home folder that are not running.")
@click.option("--folder", is_flag=True, help="Delete the runs' folders too: events, results, weights and reports.")
@click.option("--force", is_flag=True, help="Include runs that may still be running on a cloud: their functions will fail.")
@click.option("--store", "stores", multiple=True, metavar="ADDRESS", help="With --dry-run or --all: a store, too (repeatable).")
@click.option("--dry-run", is_flag=True, help="Delete nothing; without RUN, list everything on this machine, and in stores.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object per line.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clean(
    runs: tuple[str, ...], everything: bool, folder: bool, force: bool, stores: tuple[str, ...], dry_run: bool, as_json: bool, yes: bool
) -> None:
    """Delete the objects that runs have left in their channels, and what is nobody's on this machine.

    \b
    ephemeron runs clean --dry-run              all there is, with sizes and owners; nothing is deleted
    ephemeron runs clean --dry-run --store s3://bucket/prefix
    ephemeron runs clean last                   objects of the newest run
    ephemeron runs clean --all                  of all runs that are not running, and what nobody uses any more
    ephemeron runs clean --all --folder         and the runs' folders

    Lists the objects with their sizes, then asks. Weights, results and reports are in the run's folder, not in the channel.
    A run that was stopped or has failed cannot be resumed afterwards. Channels on a parameter server end with their run.

    With --all also what is no result and has no owner that lives: folders of executors, sessions and profiles, code of
    programs that no run names, packages of functions (--requirements) that none uses, matrices without a name, and staging files in stores.
    """
    if as_json and not dry_run:
        raise UserError("--json is for --dry-run")
    if stores and not (everything or (dry_run and not runs)):
        raise UserError("--store is for --dry-run and --all")
    if dry_run and not runs:
        _print_inventory(stores, as_json=as_json)
        return
    from ephemeron.cli.runs import inventory
    from ephemeron.runs import cleanup, folders
    from ephemeron.runs.status import may_be_running, status_of

    if bool(runs) == everything:
        raise UserError("say which runs: RUN..., or --all")
    chosen = folders.all_runs() if everything else list({(found := folders.find(run)).path: found for run in runs}.values())
    if everything and not force:
        chosen = [found for found in chosen if not may_be_running(status_of(found))]
    left = cleanup.left_by(chosen, force=force)
    wanted = [one for one in left if one.keys or one.problem or folder]
    if dry_run:
        _print_left(left, as_json=as_json)
        return
    going = [item for item in inventory.inventory(stores, runs=False) if not item.kept] if everything else []
    if not wanted and not going:
        click.echo(f"nothing is left in the channels of {human_count(len(left), 'run')}")
        return
    if wanted:
        _show(wanted, folder=folder)
    if going:
        _show_items(going)
    objects, nbytes = sum(len(one.keys) for one in wanted), sum(one.nbytes for one in wanted)
    what = f"{human_count(objects, 'object')} ({human_bytes(nbytes)})"
    if folder:
        total = sum(one.folder_bytes for one in wanted)
        what += f" and {human_count(len(wanted), 'folder')} with results ({human_bytes(total)})"
    if going:
        what += f" and {human_count(len(going), 'thing')} that nobody uses ({human_bytes(sum(item.nbytes for item in going))})"
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
    problems += inventory.remove(going)
    if problems:
        for problem in problems:
            click.secho(f"error: not deleted: {problem}", fg="red", err=True)
        sys.exit(1)
    click.echo(f"deleted {what}")


def _show(left: Sequence[RemainingObjects], *, folder: bool) -> None:
    table = Table("run", "status", "channel", "objects", "size", *(["folder"] if folder else []), box=None, pad_edge=False)
    for one in left:
        row = [one.folder.run_id, one.status, one.address or "none", str(len(one.keys)), human_bytes(one.nbytes)]
        if one.problem:
            row[3:] = ["?", "?"]
        table.add_row(*row, *([human_bytes(one.folder_bytes)] if folder else []))
    make_console(for_tables=True).print(table)


def _print_left(left: Sequence[RemainingObjects], *, as_json: bool) -> None:
    """What runs have in their channels, of which nothing is deleted."""
    if not as_json:
        return _show(left, folder=True)
    for one in left:
        document = {
            "run": one.folder.run_id,
            "status": one.status,
            "channel": one.address,
            "objects": len(one.keys),
            "nbytes": one.nbytes,
            "folder_bytes": one.folder_bytes,
            "problem": one.problem,
        }
        click.echo(json.dumps(document))
    return None


def _print_inventory(stores: Sequence[str], *, as_json: bool) -> None:
    """Everything there is, by kind, the largest first."""
    from ephemeron.cli.runs import inventory
    from ephemeron.config.paths import home
    from ephemeron.config.typed import plain

    items = inventory.inventory(stores)
    if as_json:
        for item in items:
            click.echo(json.dumps(plain(item)))
        return
    if not items:
        click.echo(f"there is nothing in {home()}" + "".join(f", nor in {store}" for store in stores))
        return
    _show_items(items)
    going = [item for item in items if not item.kept]
    total, free = (human_bytes(sum(item.nbytes for item in some)) for some in (items, going))
    click.echo(
        f"{total} in all; `ephemeron runs clean --all` removes {human_count(len(going), 'thing')} of these ({free}), and objects of runs"
    )


def _show_items(items: Sequence[Item]) -> None:
    table = Table("kind", "name", "size", "owner", "", "place", box=None, pad_edge=False)
    for item in sorted(items, key=lambda item: (item.kind, -item.nbytes)):
        kept = f"stays: {item.kept}" if item.kept else "may go"
        table.add_row(item.kind, item.name, human_bytes(item.nbytes), item.owner, kept, item.place)
    make_console(for_tables=True).print(table)
