"""Tables of runs, and of where a run's time went."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import click
from rich.table import Table

from ephemeron.cli.terminal import make_console
from ephemeron.events import PHASES
from ephemeron.training.driver import run_dir
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.driver.run_status import standing
from ephemeron.units import human_seconds, human_usd


def rows() -> list[dict[str, Any]]:
    """All runs, newest first."""
    out = []
    for folder in run_dir.all_runs():
        run, result = folder.read("run.json") or {}, folder.read("result.json") or {}
        metrics = result.get("metrics") or {}
        out.append({
            "run_id": folder.run_id, "status": standing(folder), "platform": run.get("platform"), "job": run.get("job"),
            "workers": run.get("configuration", {}).get("workers"), "iterations": result.get("iterations"),
            "seconds": result.get("seconds"), "cost_usd": result.get("cost_usd"),
            "accuracy": metrics.get("accuracy"), "test_loss": metrics.get("loss"), "folder": str(folder.path),
        })  # fmt: skip
    return out


def print_runs(*, as_json: bool) -> None:
    """To standard output."""
    if as_json:
        for row in rows():
            click.echo(json.dumps(row))
        return
    table = Table(
        "run", "status", "platform", "workers", "iterations", "time", "cost", "test loss", "accuracy",
        box=None, pad_edge=False,
    )  # fmt: skip
    for row in rows():
        table.add_row(
            row["run_id"], row["status"], row["platform"] or "", str(row["workers"] or ""), str(row["iterations"] or ""),
            human_seconds(row["seconds"]) if row["seconds"] is not None else "",
            human_usd(row["cost_usd"]) if row["cost_usd"] is not None else "",
            f"{row['test_loss']:.4f}" if row["test_loss"] is not None else "",
            f"{row['accuracy']:.4f}" if row["accuracy"] is not None else "",
        )  # fmt: skip
    console = make_console(piped_width=140)
    if table.row_count:
        console.print(table)
    else:
        click.echo(f"no runs in {run_dir.home() / 'runs'}; start one with: ephemeron train JOB.toml")


def print_phases(folder: RunFolder) -> None:
    """Seconds and shares by phase, summed over all functions; and, if the run had a plan, the plan against it."""
    from ephemeron.training.report.prediction import CAPTION, compare, render_text

    result = folder.read("result.json")
    if result is None:
        return
    total = sum(result["phases_s"].values()) or 1.0
    table = Table("phase", "seconds", "share", box=None, pad_edge=False)
    for phase in PHASES:
        seconds = result["phases_s"][phase]
        table.add_row(phase, f"{seconds:.2f}", f"{seconds / total:.1%}")
    make_console(width=80).print(table)
    comparison = compare(folder.path, result)
    if comparison is not None:
        click.echo(f"\n{render_text(comparison.rows)}\n")
        for words in (*comparison.notes, CAPTION):
            click.echo(textwrap.fill(words, 80))
