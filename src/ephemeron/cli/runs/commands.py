"""`ephemeron runs` and its verbs, which are commands of their own, too."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ephemeron.cli.bounds import wanted_labels_option
from ephemeron.cli.runs.clean import clean
from ephemeron.cli.runs.results import evaluate, export
from ephemeron.errors import UserError
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.runs.summary import RunResult

F = TypeVar("F", bound=Callable[..., Any])

ARGUMENTS = "ephemeron.arguments"
"""In a click context: what was given behind `ephemeron`."""
STOPPED = 3
"""Exit code of a run that was stopped, and can be resumed."""


@click.group(invoke_without_command=True, short_help="List runs, and clean up after them; has the verbs below, too.")
@wanted_labels_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.pass_context
def runs(ctx: click.Context, labels: dict[str, str], as_json: bool) -> None:
    """List runs, watch and control them, take their results, delete what they have left.

    \b
    ephemeron runs                              list runs, newest first
    ephemeron runs --label team=vision          those with a label, and what they cost together
    ephemeron runs logs last                    as `ephemeron logs last`: verbs need no `runs` before them
    ephemeron runs clean --dry-run              what there is on this machine, of runs and of everything else
    ephemeron runs clean last                   delete the objects that the newest run has left in its channel

    RUN is a name, its beginning, or `last`.
    """
    if ctx.invoked_subcommand is None:
        _list(labels, as_json)


@runs.command("list")
@wanted_labels_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def list_command(labels: dict[str, str], as_json: bool) -> None:
    """List runs, newest first, and how they ended."""
    _list(labels, as_json)


def _list(labels: dict[str, str], as_json: bool) -> None:
    from ephemeron.cli.runs.listing import print_runs

    print_runs(labels, as_json=as_json)


def output_options(command: F) -> F:
    """Options of every command that shows a run."""
    for option in (
        click.option("--out", type=click.Path(path_type=Path), help="Also copy result, weights and report into this folder."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, last on standard output."),
    ):
        command = option(command)
    return command


def detach_option(command: F) -> F:
    """The option of every command that starts a run which functions can drive."""
    return click.option(
        "--detach", is_flag=True, help="Return when functions drive the run, which needs no client then: watch it with `ephemeron attach`."
    )(command)


def detachable(command: F) -> F:
    """A command whose executor can be driven by functions: with --detach they give it again, until all its tasks have results."""

    @functools.wraps(command)
    def run(*args: Any, detach: bool, **options: Any) -> None:
        if not detach:
            command(*args, **options)
            return
        from ephemeron import blocking
        from ephemeron.executor.programs import launching
        from ephemeron.runs import detached

        argv = [each for each in click.get_current_context().meta[ARGUMENTS] if each != "--detach"]
        with launching(argv) as launch:
            command(*args, **options)
        if launch.run is None or launch.header is None:
            return  # there was nothing to do
        header = launch.header
        blocking.run(lambda _: detached.hand_over(launch.run, header, dict(launch.variables)))  # type: ignore[arg-type]
        show_detached(header.run_id, as_json=bool(options.get("as_json")))

    return detach_option(cast(F, run))


def show_detached(run: str, *, as_json: bool) -> None:
    """Says that functions drive a run, and how to see it."""
    if as_json:
        click.echo(json.dumps({"run_id": run, "detached": True}))
    else:
        click.echo(f"functions drive {run}; watch it with: ephemeron attach {run}, stop it with: ephemeron stop {run}")


def watch(start: Callable[[Callable[[Any], None]], RunResult], *, as_json: bool, after: float = -1.0) -> None:
    """Runs a function that emits events, shows those after a time of the run, prints the result and exits."""
    from ephemeron.cli.progress import Display
    from ephemeron.config.typed import plain
    from ephemeron.runs import detached
    from ephemeron.runs.header import read_header

    with Display(after=after) as display:
        result = start(display.on_event)
    display.conclude(result)
    header = read_header(result.folder)
    if header is not None and header.detached:
        detached.await_ends(result.folder)
    if header is not None and (driving := detached.driving_cost(result.folder, header)) is not None:
        click.echo(f"  {driving}", err=True)
    if as_json:
        click.echo(json.dumps(plain(result.summary)))
    sys.exit({"finished": 0, "stopped": STOPPED}.get(result.summary.status, 1))


@runs.command(short_help="Show the progress of a run, and drive it if no client does.")
@click.argument("run")
@output_options
def attach(run: str, out: Path | None, as_json: bool) -> None:
    """Show the progress of RUN, and supervise it if no other client does."""
    from ephemeron.runs import verbs

    watch(lambda on_event: verbs.attach(run, on_event=on_event, out=out, check=False, quiet_interrupt=True), as_json=as_json)


@runs.command(short_help="Continue a run from its last checkpoint.")
@click.argument("run")
@click.option("--keep-code", is_flag=True, help="Use the code of the launch though it has changed since.")
@detach_option
@output_options
def resume(run: str, keep_code: bool, detach: bool, out: Path | None, as_json: bool) -> None:
    """Continue RUN from its last checkpoint, with the current code of the job; a suspended one where it is.

    With --detach, functions drive it from now on, with the code of its launch.
    """
    from ephemeron.runs import folders, verbs

    if detach:
        return show_detached(verbs.detach(run), as_json=as_json)
    folder, header, _ = verbs.open_run(run)
    goes_on = header.platform != "simulated" and folder.events.exists()  # a simulation begins again
    watch(
        lambda on_event: verbs.resume(run, on_event=on_event, out=out, check=False, quiet_interrupt=True, keep_code=keep_code),
        as_json=as_json,
        after=folders.last_t(folder) if goes_on else -1.0,
    )


@runs.command(short_help="Suspend the functions of a run with their memory.")
@click.argument("run")
def suspend(run: str) -> None:
    """Suspend the functions of RUN with their memory, on platforms that can (aws-microvm). Only storage is billed meanwhile."""
    from ephemeron.runs import verbs

    name, functions = verbs.suspend(run)
    click.echo(f"suspended {human_count(functions, 'function')} of {name}; let them go on with: ephemeron resume {name}")


@runs.command(short_help="Stop a run at its next checkpoint.")
@click.argument("run")
@click.option("--now", is_flag=True, help="Kill the functions instead of waiting for a checkpoint.")
@click.option("--no-wait", is_flag=True, help="Return when the run has been asked to stop, not when it has stopped.")
def stop(run: str, now: bool, no_wait: bool) -> None:
    """Stop RUN at its next checkpoint, and wait until it has stopped. It can be resumed."""
    from ephemeron.cli.terminal import make_console
    from ephemeron.runs import folders, verbs
    from ephemeron.runs.header import read_header
    from ephemeron.runs.status import status_of

    with make_console(to_stderr=True).status(f"stopping {run} at its next checkpoint"):
        name = verbs.stop(run, now=now, wait=not no_wait)
    folder = folders.find(name)
    status, header = status_of(folder), read_header(folder)
    if no_wait:
        done = f"{'killed' if now else 'asked'} {name}{'' if now else ' to stop at the next consistent iteration'}"
    else:
        done = f"{name} has {status}" if status in ("finished", "failed") else f"{'killed' if now else 'stopped'} {name}"
    is_over = status == "finished" or (header is not None and header.ends_with_client)
    click.echo(done if is_over else f"{done}; continue with: ephemeron resume {name}")


@runs.command(short_help="Write the report of a run: loss, timeline, cost.")
@click.argument("run")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for report.html and report.png.  [default: the run's own]")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the report's figures as one line of JSON, and write nothing.")
def report(run: str, out: Path | None, show: bool, as_json: bool) -> None:
    """Write RUN's report: loss, the timeline of every function by phase, cost and traffic over time; of a study, its pictures."""
    from ephemeron.cli.runs.listing import print_phases
    from ephemeron.runs import folders
    from ephemeron.runs.header import read_header
    from ephemeron.runs.kinds import find_kind
    from ephemeron.training.driver.result import write_report

    folder = folders.find(run)
    record = read_header(folder)
    if record is None:
        raise UserError(f"run {folder.run_id} has no readable run.json")
    if as_json:
        from ephemeron.training.report.figures import report_figures

        if out is not None or show:
            raise UserError("--json writes no page: leave --out and --open out")
        click.echo(json.dumps(report_figures(folder.path, record) | find_kind(record.kind).figures(folder, record)))
        return
    written = find_kind(record.kind).report(folder, record, out) or write_report(folder, record.prices, out)
    print_phases(folder)
    for path in written:
        click.echo(f"wrote {path}")
    if show:
        click.launch(str(written[0]))


@runs.command(short_help="Change the functions of a run while it trains.")
@click.argument("run")
@click.option("--workers", type=click.IntRange(min=1), help="Number of functions.")
@click.option("--memory-mb", type=click.IntRange(min=1), help="Quota of each function, MB.")
@click.option("--aggregators", type=click.IntRange(min=1), help="K of K-REDUCE.  [default: as before]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples per iteration of each function.  [default: as before]")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def resize(run: str, workers: int | None, memory_mb: int | None, aggregators: int | None, batch_size: int | None, as_json: bool) -> None:
    """Change the functions of RUN while it trains.

    \b
    ephemeron resize last --workers 8
    ephemeron resize RUN --workers 8 --memory-mb 3008
    ephemeron resize RUN --workers 2 --batch-size 64       fewer functions, the same global batch

    RUN is a name, its beginning, or `last`. The functions agree on an iteration from which on the new ones train: one of the next
    iterations if the job samples globally (data.sampling), else the first one of an epoch. New functions are started ahead, and
    load meanwhile. Weights depend on these changes alone, not on what dies on the way.
    """
    from ephemeron.runs import folders
    from ephemeron.training.driver import api

    found = api.resize(run, workers=workers, memory_mb=memory_mb, aggregators=aggregators, batch_size=batch_size)
    name = folders.find(run, kinds=folders.MODELS).run_id
    if as_json:
        told: dict[str, object] = {"run_id": name, "from_iteration": None, "workers": None, "memory_mb": None}
        if found is not None:
            told |= {"from_iteration": found.from_iteration, "workers": found.workers, "memory_mb": found.memory_mb}
        click.echo(json.dumps(told))
    elif found is None:
        click.echo(f"asked {name}; its functions have not answered yet, see: ephemeron logs {name}")
    else:
        who = f"{human_count(found.workers, 'function')} of {found.memory_mb} MB"
        click.echo(f"{name}: {who} from iteration {found.from_iteration} on (epoch {found.from_epoch})")


@runs.command(short_help="Print the output of the functions of a run.")
@click.argument("run")
@click.option("--rank", type=click.IntRange(min=0), help="Show only functions of this rank.")
@click.option("--follow", "-f", is_flag=True, help="Continue until the run has ended.")
def logs(run: str, rank: int | None, follow: bool) -> None:
    """Print the output of the functions of RUN, with warnings and whole tracebacks.

    For functions on a cloud it prints the output of those that failed, and names the command that prints the rest.
    """
    from ephemeron.runs import folders
    from ephemeron.runs.logs import elsewhere, lines

    folder = folders.find(run)
    said = False
    for line in lines(folder, rank=rank, follow=follow):
        said = True
        click.echo(f"{line.source} | {line.text}")
    if rest := elsewhere(folder):
        click.echo(f"everything that functions print there: {rest}", err=True)
    elif not said:
        click.echo(f"the functions of {folder.run_id} have printed nothing", err=True)


for _command in (evaluate, export, clean):
    runs.add_command(_command)
