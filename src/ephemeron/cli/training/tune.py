"""`ephemeron tune`: search for the best parameters of a job and of its run, or of a Python function."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import click

from ephemeron.cli.bounds import bounded, code_options, label_option, requirements_option
from ephemeron.cli.clouds import cloud_settings, place_options, taken
from ephemeron.cli.predictions import dry_run_option, show_prediction
from ephemeron.cli.runs.commands import detach_option, show_detached
from ephemeron.cli.terminal import make_console
from ephemeron.cli.training.sparse_plan import say
from ephemeron.config.typed import AtLeast, Count, Positive
from ephemeron.errors import UserError
from ephemeron.units import human_metric, human_usd

if TYPE_CHECKING:
    from ephemeron.tuning.folder import StudyStatus, TrialRecord
    from ephemeron.tuning.study import Study, StudyResult

F = TypeVar("F", bound=Callable[..., Any])

SHOWN = 20
STOPPED = 3
_JOB = "as in [run] of the job"


def _objective_options(command: F) -> F:
    """Options that describe a study of a function, in place of a file."""
    for option in reversed(
        (
            click.option("--objective", metavar="MODULE:FUNCTION", help="Python function that is searched, in place of STUDY."),
            click.option(
                "--space",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="TOML: by argument, a list of values, or a table with low, high, and optionally log or step.",
            ),
            click.option("--trials", type=int, callback=bounded(Count), help="Number of trials.  [default: all of a grid]"),
            click.option(
                "--metric", metavar="NAME", help="Key of results that are dicts, and name of those that are numbers.  [default: value]"
            ),
            click.option("--mode", type=click.Choice(["min", "max"]), help="Whether lower or higher is better.  [default: min]"),
            click.option("--sampler", type=click.Choice(["tpe", "random", "grid"]), help="What suggests trials.  [default: tpe]"),
            click.option("--pruner", type=click.Choice(["none", "asha", "hyperband"]), help="What ends trials early.  [default: none]"),
            click.option("--seed", type=int, help="Seed of the suggestions.  [default: 0]"),
            click.option("--name", metavar="NAME", help="Name of the study among runs.  [default: that of the function]"),
            click.option("--memory-mb", type=int, callback=bounded(Count), help="Memory of each function; CPU comes in proportion."),
            click.option("--timeout-s", type=float, callback=bounded(Positive), help="Time limit of a trial.  [default: none]"),
            click.option(
                "--function-timeout-s", type=float, callback=bounded(Positive), help="Time limit of a function, which runs many trials."
            ),
            click.option(
                "--retries",
                type=int,
                callback=bounded(Annotated[int, AtLeast(0)]),
                help="Times that a trial begins again whose function died.  [default: 2]",
            ),
            click.option(
                "--max-failures",
                type=int,
                callback=bounded(Count),
                help="Trials that may fail in a row before the study is stopped.  [default: 5]",
            ),
            click.option(
                "--deadline-s", type=float, callback=bounded(Positive), help="Seconds for which the study may run.  [default: any]"
            ),
            click.option(
                "--code",
                multiple=True,
                type=click.Path(path_type=Path),
                metavar="FOLDER",
                help="Folder to search and to send along, beside that of the module (repeatable).",
            ),
            code_options,
            requirements_option,
            click.option("--prices", type=click.Path(path_type=Path), help="Price file instead of the built-in prices."),
        )
    ):
        command = option(command)
    return command


_OF_OBJECTIVE = (
    *("space", "trials", "metric", "mode", "sampler", "pruner", "seed", "name", "memory_mb", "timeout_s", "function_timeout_s", "retries"),
    *("max_failures", "deadline_s", "code", "code_include", "code_exclude", "requirements", "prices"),
)
"""Arguments of the command that belong to `--objective`."""


@click.command(short_help="Find the best parameters of a job or of a Python function.")
@click.argument("study", type=click.Path(path_type=Path), required=False)
@_objective_options
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
    study: Path | None,
    objective: str | None,
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
    """Search for the best values of the parameters that STUDY, a TOML file, names; or those of a Python function.

    \b
    ephemeron tune study.toml                    run all trials, on one pool of warm functions
    ephemeron tune study.toml --dry-run          predicted time and cost; nothing is started
    ephemeron tune study.toml --dry-run --profile    the same, from steps that are measured here first
    ephemeron tune study.toml --resume           after an interrupt, or when the client was killed
    ephemeron tune study.toml --attach           watch it from another terminal
    ephemeron train ~/.ephemeron/runs/study/best.toml    train with the best values
    ephemeron tune --objective models:fit --space space.toml --trials 50 --max-workers 4    a function; needs no PyTorch

    Ctrl-C stops all trials at a checkpoint; Ctrl-C twice kills their functions. --resume continues in both cases; trials of a function that were
    running begin anew.
    """
    chosen = [
        name
        for name, given in (("--resume", resume), ("--attach", attach), ("--dry-run", dry_run), ("--end-trial", end_trial is not None))
        if given
    ]
    if len(chosen) > 1:
        raise UserError(f"{chosen[0]} and {chosen[1]} exclude each other")
    if measures and not dry_run:
        raise UserError("--profile belongs to --dry-run: a study that runs measures what it needs")
    if measures and objective:
        raise UserError("--profile is for studies of a job: with --dry-run alone, trials of an objective are tried")
    if labels and (resume or attach):
        raise UserError("--label is for a study that begins: one that goes on keeps those that it has")
    where, own = taken(flags), {name: flags.pop(name) for name in _OF_OBJECTIVE}
    options = {name: value for name, value in flags.items() if value is not None}
    opened = _opened_file(study, own, out, options) if objective is None else _opened_objective(study, objective, own, out, options)
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


def _opened_file(study: Path | None, own: Mapping[str, Any], out: Path | None, options: Mapping[str, Any]) -> Study:
    """The study of a file."""
    from ephemeron.tuning.study import Study

    if study is None:
        raise UserError(
            "there is nothing to search: give a STUDY file, or --objective MODULE:FUNCTION with --space FILE; "
            "a study that has begun goes on by its name: ephemeron resume NAME"
        )
    for name, value in own.items():
        if value not in (None, ()):
            raise UserError(f"--{name.replace('_', '-')} belongs to --objective: set {name} in {study}")
    return Study.open(study, out=out, options=options)


def _opened_objective(study: Path | None, objective: str, own: dict[str, Any], out: Path | None, options: dict[str, Any]) -> Study:
    """The study of a function."""
    from ephemeron.tuning.api import study_of

    if study is not None:
        raise UserError(f"{study} and --objective exclude each other: a study file names its objective itself")
    space = own.pop("space")
    if space is None:
        raise UserError("--objective needs --space FILE: the values that its parameters may have")
    return study_of(objective, _space(space), out=out, **own, **options)


def _space(path: Path) -> Mapping[str, Any]:
    """The space in a file: a table `[space]`, or all of it."""
    from ephemeron.config.toml import parse_toml

    try:
        raw = parse_toml(path.read_text(), where=str(path))
    except FileNotFoundError:
        raise UserError(f"--space {path} does not exist; give a TOML file with a line such as: lr = [0.01, 0.1]") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--space {path} cannot be read: {e}") from None
    inner = raw.get("space")
    if isinstance(inner, Mapping) and len(raw) == 1:
        return inner
    return raw


class _on_trial:
    """Prints a line for every trial that ends, and the traceback of one that raised what none before has."""

    def __init__(self, study: Study) -> None:
        self._metric = study.file.spec.metric
        self._shown: set[str] = set()

    def __call__(self, trial: TrialRecord) -> None:
        from ephemeron.tuning.results import trial_text

        if trial.state in ("running", "waiting"):
            return
        say(trial_text(trial, self._metric))
        if trial.traceback and trial.reason not in self._shown:
            self._shown.add(trial.reason)
            say(trial.traceback.rstrip())


def _show(study: Study, result: StudyResult, *, as_json: bool) -> None:
    from ephemeron.tuning import results
    from ephemeron.tuning.results import parameters_text
    from ephemeron.units import duration

    status, best = result.status, result.best
    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    _table(status)
    counts = ", ".join(f"{result.count(state)} {state}" for state in ("finished", "pruned", "failed"))
    click.echo(f"study {status.name} {_ended(status)}: {counts}; {duration(status.seconds)}, {human_usd(status.spent_usd)}")
    if status.reason:
        click.secho(status.reason, fg="red")
    if status.state == "stopped":
        click.echo(f"  go on with it: ephemeron resume {study.folder.run.run_id}")
    if hint := results.hint(status):
        click.secho(hint, fg="yellow")
    if best is None:
        click.echo("no trial has finished")
        return
    click.echo(f"best: {status.metric} {best.value:.6g} with {parameters_text(best.parameters)} (trial {best.number})")
    use = "its values" if status.is_of_objective else "train it: ephemeron train"
    click.echo(f"  {use}{':' if status.is_of_objective else ''} {study.folder.path / results.BEST_FILE}")
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
    is_predicted = any(t.predicted_usd is not None for t in trials)
    predicted = ["predicted"] if is_predicted or not status.is_of_objective else []
    keys = [k.removeprefix("run.") for k in status.parameters]
    table = Table("trial", status.metric, *keys, "s", "cost", *predicted, "", box=None, pad_edge=False)
    for t in trials[:SHOWN]:
        values = [t.parameters.get(k, "") for k in status.parameters]
        table.add_row(
            str(t.number),
            "" if t.value is None else human_metric(t.value),
            *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values),
            f"{t.seconds:.1f}" if t.started else "",
            human_usd(t.cost_usd) if t.started else "",
            *(["" if t.predicted_usd is None else human_usd(t.predicted_usd)] if predicted else []),
            "" if t.state == "finished" else t.reason or t.state,
            style="bold" if t.number == status.best else None,
        )
    make_console(for_tables=True).print(table)
    if len(trials) > SHOWN:
        click.echo(f"… {len(trials) - SHOWN} more in trials.csv")
