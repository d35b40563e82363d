"""`ephemeron profile`: measured coefficients of a workload and a platform, with their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.cli.bounds import bounded
from ephemeron.cli.clouds import cloud_options, cloud_settings, taken
from ephemeron.cli.terminal import make_console, text_of
from ephemeron.cli.training.sparse_plan import refuse_options, sparse_profile
from ephemeron.config.typed import Positive
from ephemeron.training.job import PLATFORMS
from ephemeron.units import human_count

if TYPE_CHECKING:
    from rich.console import Console

    from ephemeron.training.planner.model.profile import Profile
    from ephemeron.training.planner.model.rates import Rate


@click.command(short_help="Measure steps, memory, starts and transfers of a job.")
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--platform",
    type=click.Choice(PLATFORMS),
    default="local",
    show_default=True,
    help="Platform to probe. Functions of a cloud are paid: see --budget-usd.",
)
@cloud_options
@click.option(
    "--memory-mb",
    metavar="MB[,MB…]",
    help="Memory sizes to measure on a cloud.  [default: all that are deployed; on ray and lithops 512, 1024, 1769, 3008]",
)
@click.option(
    "--budget-usd",
    type=float,
    callback=bounded(Positive),
    default=0.5,
    show_default=True,
    help="Largest cost of the probes on a cloud, at the prices of AWS; shown before the first is started.",
)
@click.option("--channel", metavar="ADDRESS", default="folder", show_default=True, help="Channel to probe.")
@click.option("--out", type=click.Path(path_type=Path), default="profile.json", show_default=True, help="File of the profile.")
@click.option(
    "--confidence",
    type=float,
    default=0.05,
    show_default=True,
    metavar="SHARE",
    help="Relative half width of the 95 % interval of every predicted step; a larger one needs fewer probes.",
)
@click.option("--no-cache", is_flag=True, help="Measure the platform again instead of reusing an earlier measurement.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON, last on standard output.")
def profile(
    job: Path,
    platform: str,
    channel: str,
    out: Path,
    confidence: float,
    no_cache: bool,
    as_json: bool,
    memory_mb: str | None,
    budget_usd: float,
    **flags: Any,
) -> None:
    """Measure steps, memory, starts and transfers of JOB, for `ephemeron plan`.

    Runs its model in a few functions of different quotas, one at a time, until every step is predicted within
    --confidence, or for 90 seconds. The platform's part is measured once, kept in the home folder and reused.

    \b
    ephemeron profile job.toml                                                       on this machine
    ephemeron profile job.toml --platform aws --channel s3://bucket/prefix --budget-usd 0.2

    Of a sparse job, some hundred steps of one function through real shards are measured, on this machine.

    On a cloud its functions of every size are measured. The largest cost of these calls is shown first; a budget that does not
    cover it is refused. `ephemeron plan JOB --platform …` then uses what was measured there.
    """

    from ephemeron.errors import JobError
    from ephemeron.functions.async_invoke.sizes import parse_sizes
    from ephemeron.training import planning_workflow
    from ephemeron.training.job import load_job
    from ephemeron.training.profiling import profile_job

    wanted = load_job(job)
    settings = cloud_settings(platform, taken(flags))
    if memory_mb is not None and settings is None:
        raise JobError(f"platform {platform} takes no --memory-mb: its sizes are chosen by what is measured")
    sizes = () if memory_mb is None else parse_sizes(memory_mb, low_mb=1, high_mb=1 << 30)
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise JobError(f"--out {out} is not a file in a folder that exists", remedy="make the folder, or name a file")
    if wanted.sparse is not None:
        refuse_options("memory_mb", "budget_usd", "confidence", "channel", what="a sparse job")
        return sparse_profile(wanted, platform=platform, out=out, as_json=as_json)
    console = make_console(to_stderr=True)
    shown = console.status("profiling") if console.is_terminal else None

    def tell(text: str) -> None:
        if shown is not None:
            shown.update(text_of(f"profiling: {text}"))
        else:
            console.print(f"profiling: {text}", style="dim")

    if shown is not None:
        shown.start()
    try:
        measured = profile_job(
            wanted,
            platform=platform,
            channel=channel,
            confidence=confidence,
            use_cache=not no_cache,
            on_progress=tell,
            cloud=settings,
            sizes_mb=sizes,
            budget_usd=budget_usd,
            on_budget=lambda text: console.print(f"profiling: {text}"),
            out=out,
        )
    finally:
        if shown is not None:
            shown.stop()
    planning_workflow.keep(wanted, measured, platform=platform, channel=channel)
    print_profile(measured, make_console(to_stderr=as_json, width=110))
    if as_json:
        click.echo(measured.to_json(), nl=False)
    else:
        click.echo(f"wrote {out}; plan with it: ephemeron plan {job} --profile {out}")


def print_profile(profile: Profile, console: Console) -> None:
    """Coefficients with their intervals, errors on what was kept out, starts and transfers."""
    _print_workload(profile, console)
    console.print()
    _print_platform(profile, console)


def _print_workload(profile: Profile, console: Console) -> None:
    from rich.table import Table

    w, steps = profile.workload, profile.fit.steps
    widths = steps.plus_minus
    table = Table("workload", "value", "± 95 %", "", box=None, pad_edge=False)
    for name, text in (("a", "s·MB per sample: a step takes a·(B + b)/(M + m)"), ("b", "samples"), ("m", "MB")):
        half = widths.get(name)
        table.add_row(name, f"{getattr(w, name):.4g}", "" if half is None else f"{half:.2g}", text)
    table.add_row("k", f"{w.memory_slope_mb:.4g}", "", "MB per sample of a batch")
    table.add_row("c", f"{w.memory_base_mb:.4g}", "", "MB, at least: no probe took more than k·B + c")
    table.add_row("model", f"{w.model_mb:.4g}", "", f"MB exchanged; {w.state_mb:.4g} MB in a checkpoint")
    table.add_row("data", f"{w.dataset_mb:.4g}", "", f"MB, {human_count(w.samples, 'sample')}; {w.test_samples} for testing")
    if w.apply_s:
        table.add_row("optimiser", f"{1000 * w.apply_s:.3g}", "", "ms of a whole vCPU per step")
    console.print(table)
    if steps.given:
        console.print("a, b and m are the job's own ([simulation] compute)", style="dim")
        return
    share = _percent(steps.half_width)
    kept = _percent(steps.kept_out_error)
    probes, held = len(steps.probes), len(steps.kept_out)
    wanted = "" if steps.wanted is None else f"wanted {_percent(steps.wanted)}; stopped: "
    console.print(
        f"{human_count(probes, 'probe')}; any step of {_span(steps.batches)} samples at {_span(steps.quotas_mb)} MB: ± {share} "
        f"({wanted}{steps.stopped})"
    )
    if held:
        console.print(f"{human_count(held, 'probe')} kept out of the fit are predicted with a mean error of {kept}")


def _print_platform(profile: Profile, console: Console) -> None:
    from rich.table import Table

    from ephemeron.units import human_seconds

    p = profile.platform
    poll = f"an empty poll {human_ms(p.poll_s)}" if p.poll_s else "the store waits by itself"
    console.print(f"{p.name}, {p.channel}: cold start {human_seconds(p.cold_start_s)}, warm {human_ms(p.warm_start_s)}, {poll}")
    known = profile.fit.platform
    errors = {(row.memory_mb, way): error for row in known.transfer.rows for way, error in (("up", row.up_error), ("down", row.down_error))}
    table = Table("quota", "", "form", "0.1 MB", "1 MB", "10 MB", "error on sizes kept out", box=None, pad_edge=False)
    for transfer in p.transfer:
        for way, arrow in (("up", "↑"), ("down", "↓")):
            rate: Rate = getattr(transfer, way)
            error = errors.get((transfer.memory_mb, way))
            table.add_row(
                f"{transfer.memory_mb:g} MB" if way == "up" else "",
                arrow,
                type(rate).__name__.lower(),
                *(human_ms(float(rate.seconds(s))) for s in (0.1, 1.0, 10.0)),
                _percent(error) if error is not None else "",
            )
    console.print(table)
    if p.links is not None:
        links = p.links
        fails = f", {100 * links.failure:.3g} % of pairs without one" if links.failure else ""
        console.print(
            f"direct links: {human_ms(links.latency_s)} for a small message, {links.mb_s:,.0f} MB/s each way, "
            f"{1000 * links.cpu_s_per_mb:.3g} ms of a whole vCPU per MB; {human_ms(links.setup_s)} to set up, "
            f"{human_ms(links.setup_each_s)} per further link{fails}; {links.source}"
        )
    if known.calls:
        console.print(
            f"{known.calls} calls of functions, billed ${known.billed_usd:.4f}; cold starts "
            f"{', '.join(human_seconds(s) for s in known.cold_starts_s) or 'none'}",
            style="dim",
        )
    if known.reused:
        console.print(f"platform measured on {known.measured_on} and reused; --no-cache measures it again", style="dim")


def human_ms(s: float) -> str:
    """`0.0123 -> '12.3 ms'`."""
    from ephemeron.units import human_seconds

    return f"{1000 * s:.3g} ms" if s < 1 else human_seconds(s)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _span(values: Sequence[int]) -> str:
    return "?" if not values else str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
