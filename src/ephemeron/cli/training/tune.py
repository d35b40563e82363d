"""`ephemeron tune`: search for the best parameters of a job and of its run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.cli.bounds import label_option
from ephemeron.cli.clouds import cloud_settings, place_options, taken
from ephemeron.cli.predictions import dry_run_option, show_prediction
from ephemeron.cli.runs.commands import detach_option, show_detached
from ephemeron.cli.terminal import make_console
from ephemeron.cli.training.sparse_plan import say
from ephemeron.errors import UserError
from ephemeron.units import human_metric, human_usd

if TYPE_CHECKING:
    from ephemeron.tuning.folder import StudyStatus, TrialRecord
    from ephemeron.tuning.study import Study, StudyResult

SHOWN = 20
STOPPED = 3
_JOB = "as in [run] of the job"


@click.command(short_help="Find the best parameters of a job, over many runs.")
@click.argument("study", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the study.  [default: ~/.ephemeron/runs/NAME]")
@click.option("--resume", is_flag=True, help="Go on with a study that was interrupted, or whose client has ended.")
@click.option("--attach", is_flag=True, help="Watch a study that another client drives; go on with it if that client ends.")
@click.option("--end-trial", type=click.IntRange(min=0), metavar="N", help="Ask the study's client to end trial N.")
@place_options(platform=_JOB, channel=_JOB, workers="concurrency of the study", budget="budget_usd of the study")
@label_option
@dry_run_option
@click.option(
    "--profile", "measures", is_flag=True, help="With --dry-run: measure steps of the job on this machine first, if it has no profile."
)
@detach_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, last on standard output.")
def tune(
    study: Path,
    out: Path | None,
    resume: bool,
    attach: bool,
    end_trial: int | None,
    labels: dict[str, str],
    dry_run: bool,
    measures: bool,
    detach: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Search for the best values of the parameters that STUDY, a TOML file, names.

    \b
    ephemeron tune study.toml                    run all trials, on one pool of warm functions
    ephemeron tune study.toml --dry-run          predicted time and cost; nothing is started
    ephemeron tune study.toml --dry-run --profile    the same, from steps that are measured here first
    ephemeron tune study.toml --resume           after an interrupt, or when the client was killed
    ephemeron tune study.toml --attach           watch it from another terminal
    ephemeron train ~/.ephemeron/runs/study/best.toml    train with the best values

    Ctrl-C stops all trials at a checkpoint; Ctrl-C twice kills their functions. --resume continues in both cases.
    """
    from ephemeron.tuning.study import Study

    chosen = [
        name
        for name, given in (("--resume", resume), ("--attach", attach), ("--dry-run", dry_run), ("--end-trial", end_trial is not None))
        if given
    ]
    if len(chosen) > 1:
        raise UserError(f"{chosen[0]} and {chosen[1]} exclude each other")
    if measures and not dry_run:
        raise UserError("--profile belongs to --dry-run: a study that runs measures what it needs")
    if labels and (resume or attach):
        raise UserError("--label is for a study that begins: one that goes on keeps those that it has")
    where = taken(flags)
    opened = Study.open(study, out=out, options={name: value for name, value in flags.items() if value is not None})
    opened.cloud = cloud_settings(opened.platform, where)
    if end_trial is not None:
        opened.end_trial(end_trial)
        click.echo(f"trial {end_trial} of study {opened.file.spec.name} is asked to end", err=as_json)
        return
    if dry_run:
        return show_prediction(lambda: opened.dry_run(say, measures=measures), as_json=as_json)
    if detach:
        return show_detached(opened.detach(resume=resume, on_progress=say, labels=labels), as_json=as_json)
    told = _on_trial(opened)
    if attach:
        result = opened.attach(on_trial=told, quiet_interrupt=True)
    else:
        result = opened.run(resume=resume, on_trial=told, on_progress=say, labels=labels, quiet_interrupt=True)
    _show(opened, result, as_json=as_json)
    if result.status.state == "stopped":
        sys.exit(STOPPED)
    if result.best is None:
        sys.exit(1)


class _on_trial:
    """Prints a line for every trial that ends."""

    def __init__(self, study: Study) -> None:
        self._metric = study.file.spec.metric

    def __call__(self, trial: TrialRecord) -> None:
        from ephemeron.tuning.results import trial_text

        if trial.state not in ("running", "waiting"):
            say(trial_text(trial, self._metric))


def _show(study: Study, result: StudyResult, *, as_json: bool) -> None:
    from ephemeron.tuning.results import parameters_text
    from ephemeron.units import duration

    status, best = result.status, result.best
    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    _table(status)
    counts = ", ".join(f"{result.count(state)} {state}" for state in ("finished", "pruned", "failed"))
    click.echo(f"study {status.name} {_ended(status)}: {counts}; {duration(status.seconds)}, {human_usd(status.spent_usd)}")
    if best is None:
        click.echo("no trial has finished")
        return
    click.echo(f"best: {status.metric} {best.value:.6g} with {parameters_text(best.parameters)} (trial {best.number})")
    click.echo(f"  train it: ephemeron train {study.folder.path / 'best.toml'}")
    click.echo(f"  pictures, table and Optuna's storage: {study.folder.path}")


def _ended(status: StudyStatus) -> str:
    return {
        "budget": "has ended: its budget is spent",
        "deadline": "has ended: its deadline is reached",
        "stopped": "was stopped",
        "finished": "has finished",
        "running": "runs",
    }[status.state]


def _table(status: StudyStatus) -> None:
    from rich.table import Table

    from ephemeron.tuning.results import ranked

    trials = ranked(status)
    table = Table(
        "trial", status.metric, *(k.removeprefix("run.") for k in status.parameters), "s", "cost", "predicted", "", box=None, pad_edge=False
    )
    for t in trials[:SHOWN]:
        values = [t.parameters.get(k, "") for k in status.parameters]
        table.add_row(
            str(t.number),
            "" if t.value is None else human_metric(t.value),
            *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values),
            f"{t.seconds:.1f}" if t.started else "",
            human_usd(t.cost_usd) if t.started else "",
            "" if t.predicted_usd is None else human_usd(t.predicted_usd),
            "" if t.state == "finished" else t.reason or t.state,
            style="bold" if t.number == status.best else None,
        )
    make_console(for_tables=True).print(table)
    if len(trials) > SHOWN:
        click.echo(f"… {len(trials) - SHOWN} more in trials.csv")
