"""`ephemeron train`: a run of a job on functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.cli.bounds import bounded, code_options, label_option, target
from ephemeron.cli.clouds import cloud_options, cloud_settings, renamed_option, taken
from ephemeron.cli.predictions import dry_run_option, show_prediction
from ephemeron.cli.runs.commands import detach_option, output_options, show_detached, watch
from ephemeron.cli.training.sparse_plan import planned_options, say
from ephemeron.config.typed import Count, Positive
from ephemeron.errors import EphemeronError, JobError, MissingExtra, UserError
from ephemeron.training.job import (
    COMPRESSIONS,
    EXCHANGES,
    LOGGERS,
    ON_NON_FINITE,
    PATTERNS,
    PLATFORMS,
    REGION_PLANS,
    SCHEDULES,
    Configuration,
    load_job,
)
from ephemeron.training.job.former_names import FLAGS
from ephemeron.training.job.run_options import flat, merged, nested
from ephemeron.training.planner import EXPLICIT

if TYPE_CHECKING:
    from ephemeron.training.job import Job, LoggerSpec
    from ephemeron.training.planner import Plan
    from ephemeron.training.planner.model.profile import Profile
    from ephemeron.training.planner.plan import StoredPlan
    from ephemeron.tuning.siren.workflow import LearnedRun


LEARNED = "learned"


@click.command(short_help="Train a model on functions, and show its progress.")
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
@renamed_option("--max-workers", "--workers: so many train, neither more nor fewer")
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
    "--regions", metavar="FILE", help="File of regions, each with functions, platform, channel and data of its own (docs/regions.md)."
)
@click.option(
    "--region-plan",
    type=click.Choice(REGION_PLANS),
    help="Functions of the regions of FILE that have no workers: in proportion to their data (algorithm 1 of Cloudless-Training), exactly the cheapest at its pace or the fastest, or all.  [default: plan of FILE, or match]",
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
@code_options
@label_option
@dry_run_option
@detach_option
@output_options
def train(
    job: str,
    arguments: tuple[str, ...],
    faults: tuple[str, ...],
    prices_file: Path | None,
    plan_file: Path | None,
    epochs: int | None,
    budget_usd: float | None,
    loggers: tuple[str, ...],
    labels: dict[str, str],
    code_include: tuple[str, ...],
    code_exclude: tuple[str, ...],
    dry_run: bool,
    detach: bool,
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

    where = taken(flags)
    flags = {FLAGS.get(name, name): value for name, value in flags.items()}
    if not dry_run:
        click.get_current_context().with_resource(head_start(job, flags))
    from ephemeron.training.driver import api
    from ephemeron.training.driver.launching.programs import job_of
    from ephemeron.training.job import parse_fault

    schedule = _wanted_schedule(flags)
    selected = {"code_include": code_include or None, "code_exclude": code_exclude or None}
    wanted = job_of(job, {"arguments": arguments or None, "epochs": epochs, **selected})
    if budget_usd is not None:
        wanted = dataclasses.replace(wanted, limits=dataclasses.replace(wanted.limits, budget_usd=budget_usd))
    plan: StoredPlan | None = None
    profile: Profile | None = None
    chosen: Mapping[str, Any] = {}
    if schedule is not None:
        learned = _learned_run(wanted, schedule, flags, plan_file, where)
        profile, chosen = learned.profile, learned.options
        own = {name: value for name, value in flat(wanted.run).items() if name not in flat(chosen)}
        wanted = dataclasses.replace(wanted, run=nested(own))
    elif wanted.sparse is not None:
        plan, chosen = planned_options(wanted, flags, plan_file, prices_file, dry_run=dry_run)
    else:
        plan, profile, chosen = _planned(wanted, flags, plan_file, prices_file, where, dry_run=dry_run)
    given = {name: value for name, value in {**flags, **flat(chosen)}.items() if value is not None}
    configuration = api.configure(wanted, on_note=lambda text: click.echo(text, err=True), **nested(given))
    settings = cloud_settings(configuration.platform, where)
    asked: dict[str, Any] = {
        "faults": [parse_fault(f) for f in faults],
        "prices_file": prices_file,
        "plan": plan,
        "profile": profile,
        "cloud": settings,
        "labels": labels,
        "loggers": _with_options(loggers, wanted) if loggers else None,
    }
    if dry_run:
        return show_prediction(lambda: api.dry_run(wanted, configuration, on_progress=say, **asked), as_json=as_json)
    if detach:
        return show_detached(api.launch(wanted, configuration, **asked), as_json=as_json)
    watch(
        lambda on_event: api.train(
            wanted, configuration, on_event=on_event, on_progress=say, out=out, check=False, quiet_interrupt=True, **asked
        ),
        as_json=as_json,
    )


def _with_options(names: Sequence[str], job: Job) -> list[LoggerSpec | str]:
    """Loggers by name, with the options that the job gives them."""
    known: dict[str, LoggerSpec] = {logger.name: logger for logger in job.loggers}
    return [known.get(name, name) for name in dict.fromkeys(names)]


def _planned(
    job: Job, flags: Mapping[str, object], plan_file: Path | None, prices_file: Path | None, where: dict[str, str], *, dry_run: bool
) -> tuple[Plan | None, Profile | None, Mapping[str, object]]:
    """The plan to run, its profile, and the options that it chooses; nothing where the user has chosen, or a dry run would have to measure."""
    from ephemeron.training.planner import EXPLICIT, PlanRequest, load_plan, make_plan, overrides
    from ephemeron.training.planning_workflow import addressed

    given = [name for name in EXPLICIT if flags.get(name) is not None]
    if plan_file is not None:
        given += [name for name in ("exchange.local_steps",) if flags.get(name) is not None]
        if given:
            flag = {option: name for name, option in FLAGS.items()}.get(given[0], given[0]).replace("_", "-")
            raise UserError(f"--plan and --{flag} both say how to run; give one of them")
        plan = load_plan(plan_file)
        return plan, None, {**overrides(plan.choice), **addressed(plan.choice, _channel(job, flags))}
    own = flat(job.run)
    if given or flags.get("regions.file") or any(name in own for name in (*EXPLICIT, "regions.file", "regions.region")):
        return None, None, {}
    from ephemeron.cli.training.plan import show
    from ephemeron.config.typed import build
    from ephemeron.functions.registry import CLOUDS
    from ephemeron.training import planning_workflow
    from ephemeron.training.job import Configuration

    flagged = {name: value for name, value in flags.items() if value is not None}
    c = build(Configuration, nested(merged(job.run, flagged)), where="configuration")
    platform = c.platform
    if platform in CLOUDS:
        measured = planning_workflow.measured_on(job, platform, None if c.store == "folder" else c.store)
        if measured is None:
            raise planning_workflow.not_measured(job, platform)
        profile = measured
    else:
        try:
            profile = planning_workflow.known_or_measured(job, platform=platform, channel=c.store, measures=not dry_run, on_progress=say)
        except JobError as e:
            if not dry_run:
                raise
            say(f"{e.problem}: train would plan workers, memory and batches; these are defaults")
            return None, None, {}
    wish = PlanRequest(
        epochs=job.epochs,
        hap_epochs_factor=job.limits.hap_epochs_factor,
        optimizer=job.optimizer if job.task is None else None,
        limits=planning_workflow.limits_of(job),
        lifetime_s=c.function_timeout_s or None,
        local_steps=c.exchange.local_steps,
    )
    sizes, _ = planning_workflow.deployed_sizes(platform, cloud_settings(platform, where))
    channel = _channel(job, flags)
    platforms = planning_workflow.platforms_for(platform, profile.platform, sizes, channel)
    plan = make_plan(profile, wish, platforms=platforms, prices_file=prices_file)
    show(plan, to_stderr=dry_run)
    return plan, profile, {**overrides(plan.choice), **addressed(plan.choice, channel)}


def _channel(job: Job, flags: Mapping[str, object]) -> str | None:
    """Address of the channel, where the user gives one."""
    found = flags.get("channel") or job.run.get("channel")
    return None if found is None else str(found)


def _wanted_schedule(flags: dict[str, object]) -> str | None:
    """Takes a learned schedule out of the options; None: there is none.

    Raises:
        UserError: neither an order of micro-batches, nor `learned`, nor a file.
    """
    given = flags.get("stages.schedule")
    if given is None or given in SCHEDULES:
        return None
    name = str(given)
    if name != LEARNED and not Path(name).exists() and Path(name).suffix != ".json":
        raise UserError(f"--schedule {name} is neither one of {', '.join(SCHEDULES)}, nor {LEARNED}, nor the file of a saved policy")
    flags["stages.schedule"] = None
    return name


def _learned_run(job: Job, schedule: str, flags: Mapping[str, object], plan_file: Path | None, where: dict[str, str]) -> LearnedRun:
    """The run of a job by a learned schedule, said in one line.

    Raises:
        UserError: the job does not allow it, or an option contradicts it.
    """
    if plan_file is not None:
        raise UserError("--plan and --schedule both say how to run; give one of them")
    if job.sparse is not None:
        raise UserError("the functions of a sparse job do not change; leave --schedule out")
    try:
        from ephemeron.tuning.siren import workflow
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "gymnasium":
            raise
        raise MissingExtra("Gymnasium", "siren") from None
    from ephemeron.training.planning_workflow import deployed_sizes

    platform = str(flags.get("platform") or job.run.get("platform") or "local")
    sizes, _ = deployed_sizes(platform, cloud_settings(platform, where))
    found = workflow.learned_run(job, schedule, flags, sizes_mb=sizes, on_progress=lambda text: click.echo(text, err=True))
    click.echo(found.note, err=True)
    return found


@contextlib.contextmanager
def head_start(job: str, flags: Mapping[str, object]) -> Iterator[None]:
    """Inside, an early daemon is starting if the run is to be on this machine and is not planned first.

    What a task or a script says itself is not known yet; its daemon starts if the options say how to run. Mistakes in the job are
    left to those who report them.

    Args:
        job: the argument of the command.
        flags: options of a run by dotted names.
    """
    with contextlib.ExitStack() as stack:
        wanted = _wanted(job, flags)
        if wanted is not None:
            from ephemeron.communication.channels import public_address
            from ephemeron.functions.early_daemon import early_daemon
            from ephemeron.functions.passed_on import daemon_environment

            _, secrets = public_address(wanted.channel)
            stack.enter_context(early_daemon(daemon_environment(secrets)))
        yield


def _wanted(job: str, flags: Mapping[str, object]) -> Configuration | None:
    """The configuration as far as it is known; None: nothing is to be started here in advance."""
    with contextlib.suppress(EphemeronError, OSError):
        from ephemeron.config.typed import build

        found = load_job(Path(job)) if Path(job).suffix in (".toml", ".json") else None
        if found is not None and found.sparse is not None:
            return None  # its functions have other imports
        own = {} if found is None else found.run
        given = merged(own, {name: value for name, value in flags.items() if value is not None})
        c = build(Configuration, nested(given), where="configuration")
        planned = not c.regions.given and not any(name in given for name in EXPLICIT)
        alone = c.regions.given or c.channel == "parameter_server" or c.pattern == "parameter-server"
        return c if c.platform == "local" and not planned and not alone else None
    return None
