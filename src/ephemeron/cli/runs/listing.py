"""Tables of runs, and of a run's time by phase."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import click
from rich.table import Table

from ephemeron.cli.terminal import make_console
from ephemeron.config.typed import plain
from ephemeron.events import PHASES, Progress
from ephemeron.runs import detached, folders
from ephemeron.runs.cost import CostMeter, latest_metrics
from ephemeron.runs.folders import PROGRESS_FILE, RESULT_FILE, RunFolder, events_of
from ephemeron.runs.header import RunHeader, read_header
from ephemeron.runs.labels import has_labels
from ephemeron.runs.status import status_of
from ephemeron.runs.summary import read_summary
from ephemeron.training.driver.records import read_result
from ephemeron.units import human_count, human_metric, human_seconds, human_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run of the table. None: not known."""

    run_id: str
    kind: str | None = None
    status: str
    parent: str = ""
    """Run of which this is a part."""
    platform: str | None = None
    job: str | None = None
    workers: int | None = None
    iterations: int | None = None
    """That all functions have done."""
    iterations_planned: int | None = None
    tasks: int | None = None
    """Of an executor: with a result; while it runs: over."""
    tasks_planned: int | None = None
    """That it has been given until now."""
    invocations: int | None = None
    seconds: float | None = None
    cost_usd: float | None = None
    driving_usd: float | None = None
    """Of the functions that drive it, beside that; None: a client drives it."""
    loss: float | None = None
    """Training loss of a run that runs."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Of the last evaluation; where there was none, those that the program has logged last."""
    labels: Mapping[str, str] = field(default_factory=dict)
    folder: str


def rows(labels: Mapping[str, str]) -> list[RunRow]:
    """All runs with these labels, newest first."""
    return [row for folder in folders.all_runs() if has_labels((row := _row(folder)).labels, labels)]


def _row(folder: RunFolder) -> RunRow:
    run, ended, result = read_header(folder), read_summary(folder), read_result(folder)
    row = RunRow(run_id=folder.run_id, status=status_of(folder), folder=str(folder.path))
    if run is not None:
        row = replace(row, kind=run.kind, parent=run.parent, platform=run.platform, job=run.name, workers=run.functions, labels=run.labels)
        if (driving := detached.driving_cost(folder, run)) is not None:
            row = replace(row, driving_usd=driving.cost_usd)
    if ended is not None:
        row = replace(row, seconds=ended.seconds, cost_usd=ended.cost_usd, invocations=ended.invocations)
    if run is not None and row.status == "running":
        return _running(row, folder, run)
    if result is not None:
        row = replace(row, iterations=result.iterations, metrics=result.metrics)
    elif ended is not None:
        row = replace(row, tasks=_number(folder, RESULT_FILE, "tasks"))
    return row


def _running(row: RunRow, folder: RunFolder, run: RunHeader) -> RunRow:
    """The row of a run from its events, in place of a result, which an earlier launch may have left."""
    meter, logged = CostMeter(run.prices, servers=run.servers), {}
    for event in events_of(folder) if folder.events.exists() else ():
        meter.feed(event)
        if isinstance(event, Progress) and event.metrics:
            logged = event.metrics
    now = meter.ended_at if run.platform == "simulated" or not run.started_at else max(meter.ended_at, time.time() - run.started_at)
    metrics = latest_metrics(meter) if meter.evaluations else meter.measured[max(meter.measured)] if meter.measured else logged
    return replace(
        row,
        workers=meter.members.workers or row.workers,
        iterations=meter.finished() if meter.members.iterations else None,
        iterations_planned=meter.members.iterations or None,
        tasks=_number(folder, PROGRESS_FILE, "tasks"),
        tasks_planned=_number(folder, PROGRESS_FILE, "of"),
        seconds=now,
        cost_usd=meter.cost_usd(now),
        invocations=meter.invocations,
        loss=meter.loss if meter.losses else None,
        metrics=metrics,
    )


def _number(folder: RunFolder, file: str, key: str) -> int | None:
    found = (folder.read(file) or {}).get(key)
    return found if isinstance(found, int) else None


def _done(row: RunRow) -> str:
    """How far it is: iterations or tasks, of all while it runs."""
    if row.tasks is not None:
        return f"{row.tasks:,}{f'/{row.tasks_planned:,}' if row.tasks_planned else ''} tasks"
    of = f"/{row.iterations_planned:,}" if row.iterations_planned else ""
    return "" if row.iterations is None else f"{row.iterations:,}{of}"


def _own_metric(row: RunRow) -> str:
    """The first metric beside the loss, with its name."""
    return next((f"{name} {human_metric(value)}" for name, value in row.metrics.items() if name != "loss" and value is not None), "")


def print_runs(labels: Mapping[str, str], *, as_json: bool) -> None:
    """Prints all runs with these labels to standard output; below a table of some, what they cost together."""
    found = rows(labels)
    if as_json:
        for row in found:
            click.echo(json.dumps(plain(row)))
        return
    have_labels = any(row.labels for row in found)
    names = ("run", "kind", "status", "platform", "workers", "done", "time", "cost", "loss", "metric")
    table = Table(*names, *(["labels"] if have_labels else []), box=None, pad_edge=False)
    for row in found:
        table.add_row(
            row.run_id,
            row.kind or "",
            row.status,
            row.platform or "",
            str(row.workers or ""),
            _done(row),
            human_seconds(row.seconds) if row.seconds is not None else "",
            human_usd(row.cost_usd) if row.cost_usd is not None else "",
            next((human_metric(loss) for loss in (row.metrics.get("loss"), row.loss) if loss is not None), ""),
            _own_metric(row),
            *([" ".join(f"{name}={value}" for name, value in row.labels.items())] if have_labels else []),
        )
    if not found:
        what = f" with {', '.join(f'{name}={value}' for name, value in labels.items())}" if labels else ""
        click.echo(f"no runs{what} in {folders.home() / 'runs'}; start one with: ephemeron train JOB.toml")
        return
    make_console(for_tables=True).print(table)
    if labels:
        names_found = {row.run_id for row in found}
        whole = [row for row in found if row.parent not in names_found]  # the cost of a part is in that of the run it is a part of
        click.echo(f"{human_count(len(whole), 'run')}, {human_usd(sum(row.cost_usd or 0.0 for row in whole))}")


def print_phases(folder: RunFolder) -> None:
    """Prints seconds and shares by phase, summed over all functions, and the comparison with the plan, if there is one."""
    from ephemeron.training.report.prediction import CAPTION, compare, render_text

    result = read_result(folder)
    if result is None:
        return
    total = sum(result.phases_s.values()) or 1.0
    table = Table("phase", "seconds", "share", box=None, pad_edge=False)
    for phase in PHASES:
        seconds = result.phases_s[phase]
        table.add_row(phase, f"{seconds:.2f}", f"{seconds / total:.1%}")
    make_console(width=80).print(table)
    comparison = compare(folder.path, plain(result))
    if comparison is not None:
        click.echo(f"\n{render_text(comparison.rows)}\n")
        for words in (*comparison.notes, CAPTION):
            click.echo(textwrap.fill(words, 80))
