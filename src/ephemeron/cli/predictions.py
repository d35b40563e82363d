"""`--dry-run`: what a command will take, as one table or one line of JSON, whatever it starts; and what commands share that read tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ephemeron.cli.terminal import make_console
from ephemeron.units import human_count, human_seconds, human_usd

if TYPE_CHECKING:
    from collections.abc import Callable

    from ephemeron.preparation.predicting import TableReport
    from ephemeron.runs.predictions import Prediction, Predictor

dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Check everything, print time, price and memory and what they rest on, and start nothing."
)

TABLES = (".csv", ".tsv", ".parquet")
"""Endings of tables."""
prepared_option = click.option(
    "--prepared",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Dataset whose pipeline makes features of rows of a table.  [default: that of the run, which is kept with it]",
)


def show_left_out(report: TableReport) -> None:
    """Says which rows of a table have no features."""
    if report.dropped:
        click.secho(f"{human_count(report.dropped, 'row')} without a prediction: drop_missing drops them", fg="yellow", err=True)
    for line in report.told:
        click.secho(line, fg="yellow", err=True)
    if report.refused:
        click.secho(
            f"{human_count(report.refused, 'row')} without a prediction: of their values no features are made", fg="yellow", err=True
        )


def show_prediction(predictor: Predictor, *, as_json: bool) -> None:
    """Predicts, and prints it."""
    found = predictor()
    if as_json:
        click.echo(json.dumps(found.document()))
        return
    console = make_console()
    lines = [*_lines(found)]
    width = max(len(name) for name, _ in lines) + 2
    for name, text in lines:
        console.print(f"{name:<{width}}{text}", soft_wrap=True)
    console.print("nothing was started or paid for")


def _lines(p: Prediction) -> Iterator[tuple[str, str]]:
    yield p.kind, f"{p.name} on {p.platform}"
    yield "time", _about(p.seconds, p.seconds_range, human_seconds)
    yield "cost", _about(p.cost_usd, p.cost_usd_range, human_usd)
    quota = f"{p.quota_mb:,} MB" if p.quota_mb else "the deployed function's"
    yield "memory", f"not known, of {quota}" if p.memory_mb is None else f"{p.memory_mb:,.0f} MB of {quota}"
    calls = "" if p.invocations is None else f", {human_count(p.invocations, 'invocation', grouped=True)}"
    yield "functions", f"{p.functions:,} at once{calls}"
    for n, basis in enumerate(p.rests_on):
        dated = f", {basis.as_of}" if basis.as_of else ""
        yield "" if n else "rests on", f"{basis.what} ({basis.source}{dated})"
    yield from p.rows
    for note in p.notes:
        yield "note", note


def _about(value: float | None, span: tuple[float, float] | None, text: Callable[[float], str]) -> str:
    if value is None:
        return "not known"
    return f"about {text(value)}" + ("" if span is None else f", {text(span[0])} to {text(span[1])}")
