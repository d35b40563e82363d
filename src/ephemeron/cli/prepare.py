"""`ephemeron prepare`: raw data to prepared datasets, by a recipe."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.cli.bounds import label_option
from ephemeron.cli.clouds import cloud_settings, place_options, taken
from ephemeron.cli.predictions import dry_run_option, show_prediction
from ephemeron.cli.runs.commands import detachable
from ephemeron.errors import BudgetReached
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.preparation.preparing import PreparationEstimate, Prepared

INTERRUPTED = 130
_RECIPE = "as in [run] of the recipe"


@click.command("prepare", short_help="Load, transform and split raw data.")
@click.argument("recipe", type=click.Path(path_type=Path), metavar="RECIPE.toml")
@place_options(platform=_RECIPE, channel=_RECIPE, workers=_RECIPE, budget=_RECIPE)
@click.option("--prices", "prices_file", type=click.Path(path_type=Path), help="Price file instead of the built-in prices.")
@label_option
@dry_run_option
@click.option("--json", "as_json", is_flag=True, help="Print a summary as one line of JSON.")
@detachable
def prepare_command(recipe: Path, prices_file: Path | None, labels: dict[str, str], dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Load, transform and split raw data as RECIPE says, on functions.

    \b
    ephemeron prepare recipe.toml
    ephemeron prepare recipe.toml --platform aws --channel s3://bucket/prefix --max-workers 200

    \b
    recipe.toml:  source = "clicks-*.csv"               also a folder, s3://bucket/prefix/*.parquet, …
                  out = "prepared"                      datasets: prepared/raw, prepared/train, prepared/test
                  on_error = "quarantine"               or fail, skip: rows that are invalid
                  [label]
                  column = "click"
                  [[steps]]
                  step = "standardise"                  or min_max, quantile_bins, impute, drop_missing, one_hot, ordinal, hash
                  [split]
                  test_fraction = 0.2

    What was interrupted or killed goes on from what is stored when the same command is given again.

    Exit codes: 0 prepared, 1 failed or budget reached, 2 refused, 130 interrupted.
    """
    from ephemeron.executor.programs import present_launch
    from ephemeron.preparation import preparing
    from ephemeron.preparation.recipe import load_recipe

    where, made = taken(flags), load_recipe(recipe)
    made = dataclasses.replace(made, run=dataclasses.replace(made.run, **{k: v for k, v in flags.items() if v is not None}))
    settings = cloud_settings(made.run.platform, where)
    if dry_run:
        return show_prediction(lambda: preparing.dry_run(made, settings=settings, prices_file=prices_file), as_json=as_json)
    if (launch := present_launch()) is not None and "://" in made.source and "://" in made.out:
        launch.keep(str(recipe), recipe.name, recipe.read_bytes())
    try:
        found = preparing.prepare(made, on_predicted=_tell, settings=settings, prices_file=prices_file, labels=labels)
    except KeyboardInterrupt as e:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        click.secho(f"interrupted; {_notes(e)}", fg="yellow", err=True)
        sys.exit(INTERRUPTED)
    except BudgetReached as e:
        click.secho(f"{e}; {_notes(e)}", fg="yellow", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(found.document()))
    else:
        _show(found)


def _notes(e: BaseException) -> str:
    return "; ".join(note for note in getattr(e, "__notes__", ()) if "parts are stored" in note) or "give the command again to go on"


def _tell(predicted: PreparationEstimate) -> None:
    click.echo(f"predicted: {human_count(predicted.tasks, 'task')}, {predicted.seconds:.0f} s, ${predicted.cost_usd:.6f}", err=True)


def _show(found: Prepared) -> None:
    for name, dataset in found.datasets.items():
        nbytes = sum(part.nbytes for part in dataset.partitions)
        rejected = f", {dataset.manifest.rejected} left out" if dataset.manifest.rejected else ""
        dropped = f", {dataset.manifest.dropped} dropped" if dataset.manifest.dropped else ""
        click.echo(
            f"{name:6}{len(dataset)} rows{rejected}{dropped}, {len(dataset.partitions)} partitions, {nbytes / 1e6:.1f} MB: {dataset.url}"
        )
    document = found.document()
    codes = {c.name: c.width for c in found.pipeline.schema_out_ if c.kind == "ordinal"} if found.pipeline else {}
    if codes:
        click.echo(f"codes: {', '.join(f'{name} {size}' for name, size in codes.items())}")
    if document["collisions"] is not None:
        click.echo(f"{document['collisions']} collisions of hashed features")
    click.echo(f"{found.seconds:.1f} s; {found.bill}", err=True)
