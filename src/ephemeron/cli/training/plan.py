"""`ephemeron plan`: the best configuration of a job, its predicted time and cost, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.cli.bounds import bounded
from ephemeron.cli.clouds import cloud_options, cloud_settings, taken
from ephemeron.cli.terminal import make_console, text_of
from ephemeron.cli.training.sparse_plan import refuse_options, sparse_plan
from ephemeron.config.typed import Count, Positive
from ephemeron.training.job import PATTERNS
from ephemeron.training.job.spec import EpochsFactor
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.training.job import Job
    from ephemeron.training.planner import Plan
    from ephemeron.training.planner.plan import Alternative

WIDTH = 110


@click.command(short_help="Find the cheapest configuration of a job, with a proof.")
@click.argument("job", type=click.Path(path_type=Path), required=False)
@click.option(
    "--profile", "profile_file", type=click.Path(path_type=Path), help="A profile.json, measured or written by hand, instead of measuring."
)
@click.option(
    "--platform",
    metavar="NAME",
    help="local, simulated, aws, aws-microvm, openfaas, ray, lithops, or published figures: aws-lambda-s3, aws-lambda-cache, aws-lambda-server, aws-microvm-s3 or aws-microvm-cache.  [default: the profile's own, else local]",
)
@cloud_options
@click.option("--any-size", is_flag=True, help="Also memory sizes that are not deployed.")
@click.option(
    "--search",
    type=click.Choice(["exact", "two-stage", "brute-force"]),
    default="exact",
    show_default=True,
    help="exact proves its optimum; two-stage is FasDL's heuristic; brute-force tries everything.",
)
@click.option("--objective", type=click.Choice(["cost", "time"]), default="cost", show_default=True, help="What to minimise.")
@click.option("--deadline-s", type=float, callback=bounded(Positive), help="Longest time of the run, instead of the job's.")
@click.option("--budget-usd", type=float, callback=bounded(Positive), help="Largest cost of the run, instead of the job's.")
@click.option(
    "--max-global-batch",
    type=int,
    callback=bounded(Count),
    help="Largest batch over all workers, instead of the job's: larger batches need more epochs.",
)
@click.option("--epochs", type=int, callback=bounded(Count), help="Number of epochs, instead of the job's.")
@click.option(
    "--hap-epochs-factor",
    type=float,
    callback=bounded(EpochsFactor),
    help="Epochs that HAP needs for BSP's accuracy, divided by BSP's, instead of the job's.  [default: the measured factor]",
)
@click.option("--pattern", type=click.Choice(PATTERNS), help="Fix the pattern.  [default: any]")
@click.option(
    "--sync", metavar="PROTOCOL", help="Fix the protocol: bsp or hap. Asynchronous protocols are not predicted.  [default: either]"
)
@click.option(
    "--compression",
    type=click.Choice(["none", "bf16", "int8", "sparse", "any"]),
    default="none",
    show_default=True,
    help="Compression of the exchange; sparse: planned as if nothing were zero; any: also lossy ones.",
)
@click.option(
    "--local-steps",
    type=int,
    callback=bounded(Count),
    help="Batches of a function between two exchanges; not searched, since they change what is learned.  [default: the job's]",
)
@click.option(
    "--channel",
    metavar="ADDRESS",
    help="Channel of platforms that are probed (folder by default); direct and direct+STORE: plan with links between functions only, others: without.",
)
@click.option(
    "--memory-step-mb",
    type=int,
    callback=bounded(Count),
    help="Difference between memory quotas that are tried.  [default: the platform's]",
)
@click.option(
    "--function-timeout-s", type=float, callback=bounded(Positive), help="Time limit of an invocation.  [default: the platform's]"
)
@click.option("--prices", "prices_file", type=click.Path(path_type=Path), help="Price file instead of the profile's prices.")
@click.option("--from-run", metavar="RUN", help="Correct the profile by the measurements of RUN.")
@click.option("--no-cache", is_flag=True, help="Measure again instead of reusing the profile of an earlier measurement.")
@click.option("--out", type=click.Path(path_type=Path), help="Write plan.json, plan.html and plan.png into this folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one line of JSON, last on standard output.")
def plan(
    job: Path | None,
    profile_file: Path | None,
    platform: str | None,
    search: str,
    objective: str,
    channel: str | None,
    prices_file: Path | None,
    from_run: str | None,
    no_cache: bool,
    out: Path | None,
    as_json: bool,
    deadline_s: float | None,
    budget_usd: float | None,
    max_global_batch: int | None,
    epochs: int | None,
    hap_epochs_factor: float | None,
    pattern: str | None,
    sync: str | None,
    compression: str,
    memory_step_mb: int | None,
    function_timeout_s: float | None,
    any_size: bool,
    local_steps: int | None,
    **flags: Any,
) -> None:
    """Find the cheapest configuration of JOB within its limits, and predict its time and cost.

    \b
    ephemeron plan job.toml                              profile on this machine (once), plan for it
    ephemeron plan job.toml --platform aws               the same job on AWS Lambda, in the sizes that are deployed
    ephemeron plan job.toml --objective time --budget-usd 0.5
    ephemeron plan --profile profile.json --epochs 10    from a profile without measuring

    Of a sparse job, numbers of functions and shards of this machine are compared.

    Nothing is trained. The optimum is proven: every candidate is computed or excluded by a bound.
    """
    import dataclasses

    from ephemeron.errors import UserError
    from ephemeron.functions.async_invoke.sizes import not_deployed
    from ephemeron.training import planning_workflow
    from ephemeron.training.job import load_job
    from ephemeron.training.planner import PlanLimits, PlanRequest, make_plan
    from ephemeron.training.planner.model.profile import load_profile
    from ephemeron.training.report.pareto import write_plan_report

    if job is None and profile_file is None and from_run is None:
        raise UserError("there is nothing to plan: give a JOB.toml, --profile FILE or --from-run RUN")
    if platform is not None and platform not in planning_workflow.PLATFORMS:
        raise UserError(f"--platform {platform} is not known; use one of {', '.join(planning_workflow.PLATFORMS)}")
    wanted = None if job is None else load_job(job)
    limits = planning_workflow.limits_of(wanted)
    if wanted is not None and wanted.sparse is not None:
        refuse_options(
            "search",
            "max_global_batch",
            "hap_epochs_factor",
            "pattern",
            "sync",
            "compression",
            "local_steps",
            "channel",
            "memory_step_mb",
            "any_size",
            "from_run",
            "out",
            what="a sparse job",
        )
        return sparse_plan(
            wanted if epochs is None else dataclasses.replace(wanted, epochs=epochs),
            profile_file=profile_file,
            platform=platform,
            prices_file=prices_file,
            use_cache=not no_cache,
            as_json=as_json,
            objective="time" if objective == "time" else "cost",
            limits=PlanLimits(deadline_s=deadline_s or limits.deadline_s, budget_usd=budget_usd or limits.budget_usd),
            function_timeout_s=function_timeout_s,
        )
    wish = PlanRequest(
        epochs=epochs or (wanted.epochs if wanted is not None else 1),
        hap_epochs_factor=hap_epochs_factor or (wanted.limits.hap_epochs_factor if wanted is not None else None),
        optimizer=wanted.optimizer if wanted is not None and wanted.task is None else None,
        limits=PlanLimits(
            deadline_s=deadline_s or limits.deadline_s,
            budget_usd=budget_usd or limits.budget_usd,
            max_global_batch=max_global_batch or limits.max_global_batch,
        ),
        minimise=objective,
        search=search,
        pattern=pattern,
        sync=sync,
        compression=compression,
        memory_step_mb=memory_step_mb,
        lifetime_s=function_timeout_s,
        local_steps=local_steps or _local_steps(wanted),
    )
    if from_run is not None:
        profile = planning_workflow.profile_of_run(from_run)
    elif profile_file is not None:
        profile = load_profile(profile_file)
    else:
        assert wanted is not None
        profile = planning_workflow.profile_for(wanted, platform or "local", channel=channel, use_cache=not no_cache, on_progress=_say)
    measured = profile_file is None and from_run is None
    where = platform or ("local" if measured else None)
    sizes: tuple[int, ...] = ()
    settings = cloud_settings(where or "local", taken(flags))
    if where is not None:
        sizes, unknown = planning_workflow.deployed_sizes(where, settings)
        if unknown:
            _say(f"any memory size is planned for, since those that are deployed are not known: {unknown}")
    platforms = (
        planning_workflow.with_links(channel, profile.platform)
        if where is None
        else planning_workflow.platforms_for(where, profile.platform, () if any_size else sizes, channel)
    )
    made = make_plan(planning_workflow.scaled(profile, platforms), wish, platforms=platforms, prices_file=prices_file)
    show(made)
    if sizes and made.choice.memory_mb not in sizes:
        click.echo(
            f"- {made.choice.memory_mb} MB are not deployed; {not_deployed(sizes, made.choice.memory_mb, f'ephemeron cloud deploy {where}')}"
        )
    if out is not None:
        for path in write_plan_report(made, out):
            click.echo(f"wrote {path}")
    if as_json:
        click.echo(made.to_json())


def _local_steps(job: Job | None) -> int:
    """Those of the job's `[run]` table."""
    from ephemeron.training.job.run_options import flat

    given = 1 if job is None else flat(job.run).get("exchange.local_steps", 1)
    assert isinstance(given, int)
    return given


def show(plan: Plan, *, to_stderr: bool = False) -> None:
    """Prints a plan."""
    import textwrap

    from rich.table import Table

    from ephemeron.training.planner import vm_baseline
    from ephemeron.training.planner.uncertainty import sentences
    from ephemeron.training.planner.vm_baseline import uncounted_words
    from ephemeron.training.report.pareto import terminal
    from ephemeron.units import duration

    c, p, s = plan.choice, plan.choice.predicted, plan.search
    console = make_console(to_stderr=to_stderr, width=WIDTH)
    proof = "proven optimal for this profile" if s.optimal else f"{s.gap:.1%} above the optimum" if s.gap is not None else "no proof"
    console.print(
        text_of(
            (f"{plan.profile.workload} on {plan.profile.platform}", "bold"),
            f", least {plan.minimise}, {proof}: {s.evaluated:,} candidates computed, {s.pruned:,} excluded, {s.seconds:.2f} s",
        ),
        soft_wrap=True,
    )
    others = f" + {c.workers - c.aggregators} × {c.batch_size_nonaggregator}" if c.workers > c.aggregators else ""
    console.print(
        text_of(
            "\n  ",
            (f"{c.workers} × {c.memory_mb:,} MB", "bold"),
            f", {c.pattern}, {c.sync}, {c.aggregators} aggregating, "
            f"over {c.channel}; samples per iteration {c.aggregators} × {c.batch_size_aggregator}{others}"
            + ("" if c.local_steps == 1 else f" in each of {c.local_steps} local steps")
            + ("" if c.compression == "none" else f", {c.compression}"),
        )
    )
    console.print(
        text_of(
            "  ",
            (duration(p.seconds), "bold"),
            " for ",
            (f"${p.cost_usd:.4g}", "bold"),
            f", {human_count(p.iterations, 'iteration', grouped=True)}, at least {p.memory_mb:,.0f} MB needed\n",
        )
    )
    if plan.profile.source:
        console.print(
            textwrap.fill(f"figures of {plan.profile.platform}: {plan.profile.source}", WIDTH, initial_indent="  ", subsequent_indent="  ")
        )
    table = Table("phase", "seconds", "share", "", "cost", "USD", box=None, pad_edge=False)
    costs = [*p.cost.items(), ("together", p.cost_usd)]
    for i, (name, seconds) in enumerate([*p.phases_s.items()]):
        cost = (costs[i][0], f"{costs[i][1]:.4g}") if i < len(costs) else ("", "")
        table.add_row(name, f"{seconds:.2f}", f"{seconds / p.seconds:.0%}", "", *cost)
    console.print(table)
    if len(plan.compared) > 1:
        console.print("\nWhat to choose between")
        _choices(console, plan, plan.compared)
    if plan.alternatives:
        console.print("\nHow sensitive it is")
        _choices(console, plan, plan.alternatives)
    if plan.machines:
        console.print("\nThe same job on one machine")
        table = Table("machine", "kind", "time", "USD", "", box=None, pad_edge=False)
        for m in plan.machines[:6]:
            kind = m.kind + (", arm64" if m.arm64 else "")
            told = "" if m.verified else "price not verified"
            table.add_row(m.name, kind, duration(m.seconds), f"{m.cost_usd:.4g}", told)
        console.print(table)
        uncounted = uncounted_words(plan.machines)
        if uncounted:
            console.print(textwrap.fill(uncounted, WIDTH))
    if len(plan.front) > 1:
        click.echo("\nTime against cost: what nothing beats in both")
        click.echo(terminal(plan))
    click.echo()
    for text in (
        f"bounded by {plan.binding}",
        *plan.advice,
        *vm_baseline.sentences(plan.gpus, plan.beyond, p.cost_usd),
        *sentences(plan.uncertainty),
        *map("extrapolated: {}".format, plan.extrapolated),
    ):
        click.echo(textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  "))


def _choices(console: Any, plan: Plan, choices: Sequence[Alternative]) -> None:
    from rich.table import Table

    from ephemeron.units import duration

    table = Table("", "W", "MB", "K", "batches", "pattern", "time", "", "USD", "", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for a in choices:
        p = a.predicted
        mark = "" if a.within_limits else "(too much)"
        table.add_row(
            a.why,
            str(a.workers),
            f"{a.memory_mb:,}",
            str(a.aggregators),
            f"{a.batch_size_aggregator}/{a.batch_size_nonaggregator}",
            f"{a.pattern}, {a.sync}",
            duration(p.seconds),
            _times(a.time_ratio),
            f"{p.cost_usd:.4g}",
            f"{_times(a.cost_ratio)} {mark}",
        )
    console.print(table)


def _times(ratio: float) -> str:
    """A ratio to the chosen configuration: per cent below a tenth, a factor above."""
    if abs(ratio - 1) < 1e-9:
        return ""
    return f"{ratio - 1:+.1%}" if 0.9 < ratio < 1.1 else f"× {ratio:.2g}"


def _say(text: str) -> None:
    click.echo(text, err=True)
