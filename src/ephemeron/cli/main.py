"""The command `ephemeron` and its subcommands for runs: `train`, `attach`, `resume`, `stop`, `report`.

Exit codes: 0 finished, 1 failed, 2 refused (a mistake in the request: nothing was started), 3 stopped and resumable. Modules
that are expensive to import are imported by the commands that need them, so that `--help` is fast.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ephemeron.blocking import terminable
from ephemeron.cli.bounds import bounded, target
from ephemeron.cli.clouds import cloud_options, cloud_settings, taken
from ephemeron.cli.dashboard import dashboard as dashboard_command
from ephemeron.cli.data import data as data_group
from ephemeron.cli.deploy import clean as clean_group
from ephemeron.cli.deploy import deploy as deploy_group
from ephemeron.cli.doctor import doctor as doctor_command
from ephemeron.cli.geo import geo as geo_group
from ephemeron.cli.learned_schedule import LEARNED, options_of, wanted_schedule
from ephemeron.cli.linalg import linalg as linalg_group
from ephemeron.cli.log_options import add_log_options
from ephemeron.cli.logs import logs as logs_command
from ephemeron.cli.map import map_command, predict_command
from ephemeron.cli.microvm import clean_microvm, deploy_microvm
from ephemeron.cli.openfaas import clean_openfaas, deploy_openfaas
from ephemeron.cli.partition import partition as partition_group
from ephemeron.cli.plan import plan as plan_command
from ephemeron.cli.platforms import platforms as platforms_command
from ephemeron.cli.prepare import prepare_command
from ephemeron.cli.profile import profile as profile_command
from ephemeron.cli.rendezvous import rendezvous as rendezvous_command
from ephemeron.cli.resize import resize as resize_command
from ephemeron.cli.results import evaluate as evaluate_command
from ephemeron.cli.results import export as export_command
from ephemeron.cli.runs import runs as runs_group
from ephemeron.cli.schema import schema as schema_command
from ephemeron.cli.sparse_plan import planned_options, sparse_dry_run
from ephemeron.cli.sparse_store import sparse_store as sparse_store_command
from ephemeron.cli.tune import tune as tune_command
from ephemeron.cli.workflow import workflow as workflow_group
from ephemeron.config.typed import Count, Positive
from ephemeron.errors import EphemeronError, UserError
from ephemeron.training.job import COMPRESSIONS, EXCHANGES, LOGGERS, ON_NON_FINITE, PATTERNS, PLATFORMS, SCHEDULES
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.training.driver import Result
    from ephemeron.training.job import Job, LoggerSpec
    from ephemeron.training.planner import Plan
    from ephemeron.training.planner.model.profile import Profile
    from ephemeron.training.planner.plan import StoredPlan

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

STOPPED = 3


@cache
def _end_without_collecting() -> None:
    """Has this process end without a search for garbage, which takes half a second where PyTorch was imported."""
    atexit.register(gc.freeze)


class CommandGroup(click.Group):
    """Group of commands whose errors become one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        _end_without_collecting()
        try:
            with terminable():
                return super().invoke(ctx)
        except UserError as e:
            _log.debug("refused", exc_info=True)
            click.secho(f"error: {e}", fg="red", err=True)
            sys.exit(2)
        except EphemeronError as e:
            _log.debug("failed", exc_info=True)
            click.secho(f"error: {e}", fg="red", err=True)
            sys.exit(1)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="ephemeron")
def main() -> None:
    """Train machine-learning models on serverless functions.

    \b
    ephemeron profile examples/digits/job.toml          measure time and memory of a job's training steps
    ephemeron plan examples/digits/job.toml             find the cheapest configuration, with a proof
    ephemeron train examples/digits/job.toml            train on this machine: functions are processes with quotas
    ephemeron train job.toml --platform simulated       train in virtual time, with a cloud's latencies and prices
    ephemeron train job.toml --platform aws             train on AWS Lambda, after `ephemeron deploy aws`
    ephemeron train job.toml --platform aws-microvm     train on AWS Lambda MicroVMs, after `ephemeron deploy aws-microvm`
    ephemeron train job.toml --platform openfaas        train on your cluster, after `ephemeron deploy openfaas`
    ephemeron train job.toml --platform ray             train on your Ray cluster, through a channel that its nodes share
    ephemeron prepare examples/clicks/recipe.toml       load, transform and split raw data, on functions
    ephemeron tune examples/digits/study.toml           find the best parameters of a job, over many runs
    ephemeron platforms                                 list platforms, and what has to be installed for each
    ephemeron doctor --platform aws --channel s3://…    check credentials, permissions, quotas, one object, one function
    ephemeron runs                                      list runs and how they ended
    ephemeron evaluate last                             evaluate trained weights on this machine
    ephemeron export last --format onnx                 write a trained model for other programs
    ephemeron predict last --data x.npz --out y.npz     apply a trained model to many inputs, on functions
    ephemeron map words:count --items a.jsonl --out b.jsonl      call a Python function for each item, on functions
    ephemeron linalg cholesky A.npy --out L.npy         factor, multiply and solve large matrices, on functions
    ephemeron report last                               write the report of a run: loss, timeline, cost
    ephemeron logs last                                 print the output of a run's functions
    ephemeron partition nets.py:net --devices devices.toml --batch-size 32     place a model on unequal devices
    ephemeron data import idx mnist/ core/mnist         describe a dataset, for loading it in parallel
    ephemeron geo plan regions.toml                     plan how many cores each region of a run uses
    ephemeron schema job                                print the JSON schema of job files, for editors

    Runs are stored in ~/.ephemeron (or $EPHEMERON_HOME). `ephemeron resume RUN` continues a run that was stopped or whose
    functions were killed. RUN is a name, its beginning, or `last`.
    """


def _output_options(command: F) -> F:
    """Options of every command that shows a run."""
    for option in (
        click.option("--out", type=click.Path(path_type=Path), help="Also copy result, weights and report into this folder."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as one line of JSON, last on standard output."),
    ):
        command = option(command)
    return command


@main.command()
@click.argument("job")
@click.argument("arguments", nargs=-1)
@click.option("--platform", type=click.Choice(PLATFORMS), help="Platform on which functions run.  [default: local]")
@cloud_options
@click.option(
    "--channel",
    metavar="ADDRESS",
    help="Channel through which functions exchange parameters: folder, s3://bucket/prefix, gs://…, az://…, redis://host:port, parameter_server, ps://host:port.  [default: folder]",
)
@click.option("--pattern", type=click.Choice(PATTERNS), help="Pattern of the reduction.  [default: k-reduce]")
@click.option(
    "--sync",
    metavar="PROTOCOL",
    help="bsp, hap (FasDL: non-aggregators one step stale), hsp (SIREN: asp with a barrier per epoch), ssp:N or asp.  [default: bsp]",
)
@click.option("--workers", type=int, help="W: number of functions.  [default: 4]")
@click.option("--aggregators", type=int, help="K: how many of them aggregate (1 is AllReduce, W is ScatterReduce).  [default: 2]")
@click.option("--stages", type=int, help="S: functions among which each copy of a large model is divided.  [default: 1]")
@click.option("--replicas", type=int, help="R: copies of the model; there are S · R functions.")
@click.option("--micro-batches", type=int, help="Parts of a replica's batch that stages process at the same time.  [default: 1]")
@click.option(
    "--schedule",
    metavar="|".join((*SCHEDULES, LEARNED, "FILE")),
    help="Order of micro-batches on a stage [default: 1f1b if there are several]; or a policy that chooses number and memory of functions epoch by epoch: learned for this job now, or saved in a file.",
)
@click.option("--recompute", is_flag=True, default=None, help="Repeat forward passes instead of keeping activations.")
@click.option("--placement", metavar="FILE", help="Placement file by `ephemeron partition --out`; without it, stages are found.")
@click.option("--memory-mb", type=int, help="Quota of each function; CPU comes in proportion (1,769 MB = 1 vCPU).")
@click.option("--batch-size", type=int, help="Samples per iteration of an aggregator.  [default: 16]")
@click.option("--nonaggregator-batch-size", type=int, help="Samples per iteration of the others.  [default: as --batch-size]")
@click.option(
    "--exchange", type=click.Choice(EXCHANGES), help="Quantity that functions exchange.  [default: gradients; with --local-steps deltas]"
)
@click.option("--local-steps", type=int, help="Batches, with an optimiser step each, between two exchanges.  [default: 1]")
@click.option(
    "--outer-optimizer",
    metavar="NAME[:OPTION=VALUE,…]",
    callback=target,
    help="Optimiser of merged deltas: average, or one of torch.optim, such as SGD:lr=1.0,momentum=0.3,nesterov=true.  [default: average]",
)
@click.option(
    "--regions",
    metavar="FILE",
    help="File of regions, each a group of functions with its own platform, channel and data (docs/regions.md).",
)
@click.option(
    "--region-sync",
    metavar="POLICY[:OPTION=VALUE,…]",
    help="Synchronisation of regions: asgd, asgd-ga, ama, sma, diloco or auto, such as diloco:fragments=4,delay=5.  [default: sma]",
)
@click.option("--exchange-every", type=int, help="H: iterations between two exchanges of regions.  [default: 10]")
@click.option(
    "--region-compression",
    metavar="none|int8|int4|topk:SHARE|topk2:SHARE",
    help="Compression of what regions exchange, with error feedback.  [default: none]",
)
@click.option(
    "--compression",
    type=click.Choice(COMPRESSIONS),
    help="Compression of the exchange; int8 has error feedback, sparse loses nothing.  [default: none]",
)
@click.option(
    "--ranks-per-machine",
    type=int,
    help="On direct channels, neighbouring functions that share a machine and add up their gradients there first.  [default: 1]",
)
@click.option(
    "--function-timeout-s", type=float, help="Time limit of an invocation; longer runs are handed off to successors.  [default: 900]"
)
@click.option("--checkpoint-every", type=int, help="Iterations between checkpoints.  [default: 25]")
@click.option(
    "--max-replacements", type=int, help="Functions that may be replaced before the run fails.  [default: 20 per worker, at least 100]"
)
@click.option("--channel-retry-s", type=float, help="Seconds for which failed requests to the channel are repeated.  [default: 300]")
@click.option(
    "--on-non-finite",
    type=click.Choice(ON_NON_FINITE),
    help="Reaction to a loss, gradient or parameter that is NaN or infinite.  [default: stop]",
)
@click.option("--epochs", type=int, callback=bounded(Count), help="Number of epochs, instead of the job's.")
@click.option(
    "--budget-usd", type=float, callback=bounded(Positive), help="Stop with a checkpoint when this much is spent, instead of the job's."
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="FAULT",
    help="Inject a fault (repeatable): kill:rank=2,iteration=5,phase=upload · duplicate:rank=1 · drop-put:rank=0,iteration=3 · delay:rank=1,factor=10 or …,factor=1,seconds=0.5 · cut:rank=0,to=2,iteration=5,seconds=30.",
)
@click.option("--prices", "prices_file", type=click.Path(path_type=Path), help="Price file instead of the built-in AWS list prices.")
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="A plan.json to run, from `ephemeron plan --out`.")
@click.option(
    "--logger",
    "loggers",
    multiple=True,
    type=click.Choice(LOGGERS),
    help="Record the run with this program (repeatable), instead of the job's loggers.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Start nothing: build and check everything, do two steps in a process with a function's memory, and estimate time and cost. Of a sparse job: check and predict.",
)
@_output_options
def train(
    job: str,
    arguments: tuple[str, ...],
    faults: tuple[str, ...],
    prices_file: Path | None,
    plan_file: Path | None,
    epochs: int | None,
    budget_usd: float | None,
    loggers: tuple[str, ...],
    dry_run: bool,
    out: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train JOB on functions, and show its progress. JOB is a TOML or JSON file, module:Class of an ephemeron.Task, or
    a script with a loop of its own, whose ARGUMENTS follow after --.

    \b
    ephemeron train script.py --workers 8 -- --lr 0.1          a script that uses ephemeron.current()
    ephemeron train tasks:Classifier --workers 4               a task of tasks.py in this folder
    ephemeron train job.toml                                   workers, memory and batches from the job, or planned
    ephemeron train job.toml --workers 8 --sync hap --channel s3://bucket/prefix
    ephemeron train job.toml --platform simulated --fault kill:rank=2,iteration=5
    ephemeron train tasks:Classifier --workers 4 --dry-run     check everything first, start nothing
    ephemeron train job.toml --schedule learned                functions chosen epoch by epoch by a learned policy (docs/siren.md)

    Options override the job's [run] table. If neither gives workers, memory or batch sizes, the job is profiled (once) and
    planned first; the plan is shown, and compared with the run's time and cost at its end. A sparse job is planned where
    neither gives workers. Ctrl-C stops all functions at a
    checkpoint; Ctrl-C twice kills them. `ephemeron resume` continues the run in both cases.
    """
    import dataclasses

    from ephemeron.cli.head_start import head_start

    where = taken(flags)
    if not dry_run:
        click.get_current_context().with_resource(head_start(job, flags))
    from ephemeron.training.driver import api
    from ephemeron.training.driver.programs import job_of
    from ephemeron.training.job import parse_fault

    schedule = wanted_schedule(flags)
    wanted = job_of(job, {"arguments": arguments or None, "epochs": epochs})
    if budget_usd is not None:
        wanted = dataclasses.replace(wanted, limits=dataclasses.replace(wanted.limits, budget_usd=budget_usd))
    plan: StoredPlan | None = None
    profile: Profile | None = None
    chosen: Mapping[str, Any] = {}
    if schedule is not None:
        learned = options_of(wanted, schedule, flags, plan_file, where)
        profile, chosen = learned.profile, learned.options
        wanted = dataclasses.replace(wanted, run={k: v for k, v in wanted.run.items() if k not in chosen})
    elif wanted.sparse is not None:
        plan, chosen = planned_options(wanted, flags, plan_file, prices_file, dry_run=dry_run)
    elif not dry_run:
        plan, profile, chosen = _planned(wanted, flags, plan_file, prices_file, where)
    configuration = api.configure(wanted, on_note=lambda text: click.echo(text, err=True), **{**flags, **chosen})
    settings = cloud_settings(configuration.platform, where)
    if dry_run and wanted.sparse is not None:
        return sparse_dry_run(wanted, configuration, prices_file, settings, as_json=as_json)
    if dry_run:
        from ephemeron.cli.dry_run import show

        found = api.dry_run(wanted, configuration, prices_file=prices_file, cloud=settings)
        return show(found, as_json=as_json)
    _watch(
        lambda on_event: api.train(
            wanted,
            configuration,
            faults=[parse_fault(f) for f in faults],
            prices_file=prices_file,
            on_event=on_event,
            out=out,
            plan=plan,
            profile=profile,
            cloud=settings,
            check=False,
            loggers=_with_options(loggers, wanted) if loggers else None,
        ),
        as_json=as_json,
    )


def _with_options(names: Sequence[str], job: Job) -> list[LoggerSpec | str]:
    """Loggers by name, with the options that the job gives them."""
    known: dict[str, LoggerSpec] = {logger.name: logger for logger in job.loggers}
    return [known.get(name, name) for name in dict.fromkeys(names)]


def _planned(
    job: Job, flags: Mapping[str, object], plan_file: Path | None, prices_file: Path | None, where: dict[str, str]
) -> tuple[Plan | None, Profile | None, Mapping[str, object]]:
    """The plan to run, its profile, and the options that it chooses; nothing where the user has chosen."""
    from ephemeron.training.planner import EXPLICIT, PlanRequest, load_plan, make_plan, overrides
    from ephemeron.training.planning_workflow import addressed

    given = [name for name in EXPLICIT if flags.get(name) is not None]
    if plan_file is not None:
        given += [name for name in ("local_steps",) if flags.get(name) is not None]
        if given:
            raise UserError(f"--plan and --{given[0].replace('_', '-')} both say how to run; give one of them")
        plan = load_plan(plan_file)
        return plan, None, {**overrides(plan.choice), **addressed(plan.choice, _channel(job, flags))}
    if given or flags.get("regions") or any(name in job.run for name in (*EXPLICIT, "groups", "regions")):
        return None, None, {}
    from ephemeron.cli.plan import show
    from ephemeron.config.typed import build
    from ephemeron.functions.registry import CLOUDS
    from ephemeron.training import planning_workflow
    from ephemeron.training.job import Configuration

    flagged = {name: value for name, value in flags.items() if value is not None}
    c = build(Configuration, {**job.run, **flagged}, where="configuration")
    platform = c.platform
    if platform in CLOUDS:
        measured = planning_workflow.measured_on(job, platform, None if c.store == "folder" else c.store)
        if measured is None:
            raise planning_workflow.not_measured(job, platform)
        profile = measured
    else:
        profile = planning_workflow.known_or_measured(
            job, platform=platform, channel=c.store, on_progress=lambda text: click.echo(text, err=True)
        )
    wish = PlanRequest(
        epochs=job.epochs,
        hap_epochs_factor=job.limits.hap_epochs_factor,
        optimizer=job.optimizer if job.task is None else None,
        limits=planning_workflow.limits_of(job),
        lifetime_s=c.function_timeout_s or None,
        local_steps=c.local_steps,
    )
    sizes, _ = planning_workflow.deployed_sizes(platform, cloud_settings(platform, where))
    channel = _channel(job, flags)
    platforms = planning_workflow.platforms_for(platform, profile.platform, sizes, channel)
    plan = make_plan(profile, wish, platforms=platforms, prices_file=prices_file)
    show(plan)
    return plan, profile, {**overrides(plan.choice), **addressed(plan.choice, channel)}


def _channel(job: Job, flags: Mapping[str, object]) -> str | None:
    """Address of the channel, where the user gives one."""
    found = flags.get("channel") or job.run.get("channel")
    return None if found is None else str(found)


@main.command()
@click.argument("run")
@_output_options
def attach(run: str, out: Path | None, as_json: bool) -> None:
    """Show the progress of RUN, and supervise it if no other client does."""
    from ephemeron.training.driver import api

    _watch(lambda on_event: api.attach(run, on_event=on_event, out=out, check=False), as_json=as_json)


@main.command()
@click.argument("run")
@click.option("--keep-code", is_flag=True, help="Use the code of the launch though it has changed since.")
@_output_options
def resume(run: str, keep_code: bool, out: Path | None, as_json: bool) -> None:
    """Continue RUN from its last checkpoint, with the current code of the job; a suspended one where it is."""
    from ephemeron.training.driver import api

    _watch(lambda on_event: api.resume(run, on_event=on_event, out=out, check=False, keep_code=keep_code), as_json=as_json)


@main.command()
@click.argument("run")
def suspend(run: str) -> None:
    """Suspend the functions of RUN with their memory, on platforms that can (aws-microvm). Only storage is billed meanwhile."""
    from ephemeron.training.driver import api

    name, functions = api.suspend(run)
    click.echo(f"suspended {human_count(functions, 'function')} of {name}; let them go on with: ephemeron resume {name}")


@main.command()
@click.argument("run")
@click.option("--now", is_flag=True, help="Kill the functions instead of waiting for a checkpoint.")
@click.option("--no-wait", is_flag=True, help="Return when the run has been asked to stop, not when it has stopped.")
def stop(run: str, now: bool, no_wait: bool) -> None:
    """Stop RUN at its next checkpoint, and wait until it has stopped. It can be resumed."""
    from ephemeron.cli.terminal import make_console
    from ephemeron.training.driver import api, run_dir
    from ephemeron.training.driver.run_status import status_of

    with make_console(to_stderr=True).status(f"stopping {run} at its next checkpoint"):
        name = api.stop(run, now=now, wait=not no_wait)
    status = status_of(run_dir.find(name))
    if no_wait:
        done = f"{'killed' if now else 'asked'} {name}{'' if now else ' to stop at the next consistent iteration'}"
    else:
        done = f"{name} has {status}" if status in ("finished", "failed") else f"{'killed' if now else 'stopped'} {name}"
    click.echo(done if status == "finished" else f"{done}; continue with: ephemeron resume {name}")


@main.command()
@click.argument("run")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for report.html and report.png.  [default: the run's own]")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
def report(run: str, out: Path | None, show: bool) -> None:
    """Write RUN's report: loss, the timeline of every function by phase, cost and traffic over time."""
    from ephemeron.cli.listing import print_phases
    from ephemeron.training.driver import run_dir
    from ephemeron.training.driver.records import read_record
    from ephemeron.training.driver.result import write_report

    folder = run_dir.find(run)
    record = read_record(folder)
    if record is None:
        raise UserError(f"run {folder.run_id} has no readable run.json")
    written = write_report(folder, record.run_spec().prices, out)
    print_phases(folder)
    for path in written:
        click.echo(f"wrote {path}")
    if show:
        click.launch(str(written[0]))


main.add_command(geo_group)
main.add_command(linalg_group)
main.add_command(workflow_group)
main.add_command(runs_group)
main.add_command(resize_command)
main.add_command(evaluate_command)
main.add_command(export_command)
main.add_command(map_command)
main.add_command(predict_command)
main.add_command(profile_command)
main.add_command(plan_command)
main.add_command(tune_command)
main.add_command(prepare_command)
main.add_command(partition_group)
main.add_command(data_group)
main.add_command(rendezvous_command)
main.add_command(sparse_store_command)
main.add_command(dashboard_command)
main.add_command(platforms_command)
main.add_command(doctor_command)
main.add_command(logs_command)
main.add_command(schema_command)
main.add_command(deploy_group)
main.add_command(clean_group)
deploy_group.add_command(deploy_microvm)
clean_group.add_command(clean_microvm)
deploy_group.add_command(deploy_openfaas)
clean_group.add_command(clean_openfaas)
add_log_options(main)


def _watch(start: Callable[[Callable[[Any], None]], Result], *, as_json: bool) -> None:
    """Runs a function that emits events, shows them, prints the result and exits."""
    from ephemeron.cli.progress import Display
    from ephemeron.config.typed import plain

    with Display() as display:
        result = start(display.on_event)
    display.conclude(result)
    if as_json:
        click.echo(json.dumps(plain(result.summary)))
    sys.exit({"finished": 0, "stopped": STOPPED}.get(result.summary.status, 1))
