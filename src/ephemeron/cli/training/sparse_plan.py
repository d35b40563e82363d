"""Predictions of sparse jobs in `ephemeron train`, `plan` and `profile` (`docs/sparse.md`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from ephemeron.cli.terminal import make_console, text_of
from ephemeron.errors import JobError
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.sparse.job.prediction import SparsePrediction
    from ephemeron.sparse.job.predictor import SparsePlan, SparsePredictor
    from ephemeron.training.job import Job
    from ephemeron.training.planner import PlanLimits


def planned_options(
    job: Job, flags: Mapping[str, object], plan_file: Path | None, prices_file: Path | None, *, dry_run: bool
) -> tuple[SparsePlan | None, dict[str, object]]:
    """The plan of a run, and the options that it chooses: the number of functions, where neither the job nor the command gives it.

    Where it is given, the prediction is shown if the job was measured before; None: it was not, or cannot be.

    Args:
        job: with a table `[sparse]`.
        flags: options of a run by dotted names.
        plan_file: of `--plan`, which is for other jobs.
        prices_file: price file instead of the built-in one.
        dry_run: the prediction is shown later.

    Raises:
        PlanInfeasible: nothing is within the job's limits.
        JobError: `--plan` is given, or the job is refused.
    """
    from ephemeron.sparse.job import predictor as plans
    from ephemeron.sparse.job import predictor as predictors
    from ephemeron.training.driver import api
    from ephemeron.training.driver.launching.launch import LaunchRequest, prepared_run
    from ephemeron.training.job.run_options import merged, nested
    from ephemeron.training.planning_workflow import limits_of

    if plan_file is not None:
        raise JobError("--plan is not for a sparse job", remedy="give --workers, and shards in the job, as ephemeron plan shows them")
    flagged = {name: value for name, value in flags.items() if value is not None}
    given = nested(merged(job.run, flagged))
    platform = str(given.get("platform", "local"))
    if "workers" in given or platform != "local":
        if platform == "local" and not dry_run and (known := predictors.stored_profile(job)) is not None:
            c = api.configure(dataclasses.replace(job, run=given))
            plan = plans.plan_of(predictors.SparsePredictor(known, prices_file), job, c)
            _tell(plan.choice.predicted, job, plan.notes)
            return plan, {}
        return None, {}
    assert job.sparse is not None
    wanted = dataclasses.replace(job, run=given)
    alone = api.configure(wanted, workers=1)
    prepared_run(LaunchRequest(job=job, configuration=alone, prices_file=prices_file))  # what is wrong is said first
    predictor = predictors.sparse_predictor(wanted, prices_file=prices_file, on_progress=say)
    plan = plans.make_sparse_plan(predictor, wanted, limits_of(job), shards=(job.sparse.shards,), configured=api.configure)
    show(plan, to_stderr=True)
    return plan, {"workers": plan.choice.workers, "memory_mb": plan.choice.memory_mb}


def sparse_plan(
    job: Job,
    *,
    profile_file: Path | None,
    platform: str | None,
    prices_file: Path | None,
    use_cache: bool,
    limits: PlanLimits,
    objective: Literal["cost", "time"],
    function_timeout_s: float | None,
    as_json: bool,
) -> None:
    """`ephemeron plan` of a sparse job.

    Raises:
        PlanInfeasible: nothing is within the limits.
        JobError: the job, the platform or the file is refused.
    """
    from ephemeron.sparse.job import predictor as plans
    from ephemeron.sparse.job import predictor as predictors
    from ephemeron.training.driver import api
    from ephemeron.training.driver.launching.launch import LaunchRequest, prepared_run

    where = platform or str(job.run.get("platform", "local"))
    predictors.check_platform(where)
    prepared_run(LaunchRequest(job=job, configuration=api.configure(job, workers=1, platform=where)))
    predictor = predictors.sparse_predictor(
        job, platform=where, profile=profile_file, use_cache=use_cache, prices_file=prices_file, on_progress=say
    )
    job = dataclasses.replace(job, run={**job.run, "platform": where})
    plan = plans.make_sparse_plan(
        predictor, job, limits, objective=objective, configured=api.configure, function_timeout_s=function_timeout_s
    )
    show(plan)
    if as_json:
        click.echo(plan.to_json())


def sparse_profile(job: Job, *, platform: str, out: Path, as_json: bool) -> None:
    """`ephemeron profile` of a sparse job.

    Raises:
        JobError: the job or the platform is refused, or the file cannot be written.
    """
    from ephemeron.sparse.job import predictor as predictors
    from ephemeron.sparse.job.profiling import measure

    predictors.check_platform(platform)
    found = measure(job, on_progress=lambda text: say(f"profiling: {text}"), out=out)
    found.save(predictors.profile_path(job))
    _show_profile(predictors.SparsePredictor(found), to_stderr=as_json)
    click.echo(found.to_json() if as_json else f"wrote {out}", nl=not as_json)


def refuse_options(*names: str, what: str) -> None:
    """Refuses options of the current command that are given and mean nothing here.

    Args:
        names: of the command's parameters.
        what: what they are not for.

    Raises:
        JobError: names the first of them.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if parameter.name in names and given:
            raise JobError(f"{parameter.opts[0]} is not for {what}", remedy="leave it out")


def show(plan: SparsePlan, *, to_stderr: bool = False) -> None:
    """Prints a plan: all candidates, the chosen one marked."""
    from rich.table import Table

    from ephemeron.units import duration

    console = make_console(to_stderr=True, width=100)
    table = Table("", "functions", "MB", "shards", "time", "USD", "steps/s", "bounded by", "", box=None, pad_edge=False)
    for c in plan.candidates:
        p, chosen = c.predicted, c is plan.choice
        table.add_row(
            "→" if chosen else "",
            str(c.workers),
            f"{c.memory_mb:,}",
            str(c.shards),
            duration(p.seconds),
            f"{p.cost_usd:.4g}",
            f"{p.steps_per_s:,.0f}",
            p.bottleneck,
            "" if c.within_limits else "(too much)",
            style="bold" if chosen else None,
        )
    console.print(
        text_of(
            (plan.job, "bold"),
            f", {human_count(plan.epochs, 'epoch')}, {human_count(plan.batch_size, 'sample')} a step, least {plan.objective}: ",
            (plan.choice.text, "bold"),
            f", {duration(plan.choice.predicted.seconds)} for ${plan.choice.predicted.cost_usd:.4g}\n",
        ),
        soft_wrap=True,
    )
    console.print(table)
    for note in plan.notes:
        console.print(f"- {note}", soft_wrap=True, highlight=False)


def _show_profile(predictor: SparsePredictor, *, to_stderr: bool) -> None:
    from rich.table import Table

    profile = predictor.profile
    console = make_console(to_stderr=True, width=110)
    console.print(text_of((profile.program, "bold"), f"; {profile.machine}, load {profile.load_average:g}"), soft_wrap=True)
    table = Table("samples", "shards", "steps", "rows", "load", "compute", "requests", "a shard", "by the clock", box=None, pad_edge=False)
    for c in profile.cells:
        times = (c.load_cpu_s, c.compute_cpu_s, c.exchange_cpu_s, c.shard_cpu_s, 1e-6 * sum(c.step_us.values()))
        table.add_row(f"{c.batch_size:,}", str(c.shards), str(c.steps), f"{c.rows:,.0f}", *(f"{1e6 * s:,.0f} µs" for s in times))
    console.print(table)
    run = profile.run
    console.print(
        f"CPU time of a step by part; until the shards are there {run.launch_s:.1f} s, start of a function {run.start_s:.1f} s",
        style="dim",
        highlight=False,
    )
    for note in predictor.notes(profile.batches[0]):
        console.print(f"- {note}", soft_wrap=True, highlight=False)


def _tell(p: SparsePrediction, job: Job, notes: tuple[str, ...]) -> None:
    from ephemeron.units import duration

    click.echo(
        f"predicted: {duration(p.seconds)} for ${p.cost_usd:.4g} (functions ${p.functions_usd:.4g}, shards ${p.servers_usd:.4g}), "
        f"{p.steps_per_s:,.0f} steps a second, bounded by {p.bottleneck}",
        err=True,
    )
    budget = job.limits.budget_usd
    if budget is not None and p.cost_usd > budget:
        click.echo(f"- more than the budget of ${budget:g}, at which the run is stopped", err=True)
    for note in notes:
        click.echo(f"- {note}", err=True)


def say(text: str) -> None:
    click.echo(text, err=True)
