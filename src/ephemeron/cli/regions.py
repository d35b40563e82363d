"""`ephemeron regions`: training across regions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ephemeron.training.job import REGION_PLANS
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.regions.planning import RegionPlan
    from ephemeron.training.job import RegionPlanMethod


@click.group(short_help="Plan, measure and change training across regions.")
def regions() -> None:
    """Train across regions: plan their devices, measure their links, plan them anew, let one join or leave."""


@regions.command("plan")
@click.argument("regions", metavar="REGIONS.toml", type=click.Path(path_type=Path))
@click.option(
    "--method",
    type=click.Choice(REGION_PLANS),
    help="match: algorithm 1 of Cloudless-Training. cheapest: never slower than that, or within --deadline-s. fastest: within --budget-usd. all: all devices.  [default: plan of REGIONS.toml, or match]",
)
@click.option("--deadline-s", type=click.FloatRange(min=0, min_open=True), help="Longest pass over the data, for cheapest.")
@click.option("--budget-usd", type=click.FloatRange(min=0, min_open=True), help="Highest cost of a pass over the data, for fastest.")
@click.option("--memory-mb", type=click.IntRange(min=0), default=0, help="Memory that a function of the job needs.")
@click.option("--samples", type=click.IntRange(min=1), help="Training samples of all regions together.")
@click.option(
    "--sample-s", type=click.FloatRange(min=0, min_open=True), help="Seconds per sample on a device of power 1.  [default: relative times]"
)
@click.option(
    "--write",
    "target",
    metavar="[OUT]",
    is_flag=False,
    flag_value="",
    help="Write the regions with the planned workers into OUT, which train --regions starts as they are; without OUT into REGIONS.toml itself.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as one line of JSON.")
def plan_command(
    regions: Path,
    method: RegionPlanMethod | None,
    deadline_s: float | None,
    budget_usd: float | None,
    memory_mb: int,
    samples: int | None,
    sample_s: float | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Plan how many cores each region of REGIONS.toml uses.

    \b
    ephemeron regions plan regions.toml
    ephemeron regions plan regions.toml --method cheapest --write planned.toml
    ephemeron regions plan regions.toml --method fastest --samples 60000 --sample-s 0.002 --budget-usd 0.1

    A region whose devices are too many for its data waits for the slowest one. A plan leaves such devices out. It is made from the devices
    alone, whatever workers the regions have.
    """
    from ephemeron.config.typed import plain
    from ephemeron.errors import JobError
    from ephemeron.regions.planning import DEFAULT_METHOD, PlanRequest, plan_regions, with_functions
    from ephemeron.regions.region_files import load_regions, write_regions

    if (samples is None) != (sample_s is None):
        raise JobError("--samples and --sample-s belong together", remedy="give both, or neither")
    known = load_regions(regions)
    request = PlanRequest(
        method=method or known.plan or DEFAULT_METHOD,
        deadline_s=deadline_s,
        budget_usd=budget_usd,
        memory_mb=memory_mb,
        samples=samples or 0,
        sample_s=1.0 if sample_s is None else sample_s,
    )
    found = plan_regions(known, request)
    if target is not None:
        planned, out = with_functions(known, found), Path(target) if target else regions
        write_regions(planned, regions, out)
    if as_json:
        click.echo(json.dumps(plain(found)))
    else:
        _show(found)
    if target is not None:
        functions = ", ".join(f"{region.name} {human_count(region.workers, 'function')}" for region in planned.region)
        click.echo(f"{out}: {functions}", err=as_json)


@regions.command("probe")
@click.argument("regions", metavar="REGIONS.toml", type=click.Path(path_type=Path))
@click.option("--mb", type=click.FloatRange(min=0.1, max=1000), default=8.0, show_default=True, help="Size of what is sent, 10^6 bytes.")
@click.option("--write", is_flag=True, help="Put the links into REGIONS.toml, in place of those that it has.")
@click.option("--json", "as_json", is_flag=True, help="Print the links as one line of JSON.")
def probe_command(regions: Path, mb: float, write: bool, as_json: bool) -> None:
    """Measure bandwidth and latency between all regions of REGIONS.toml.

    \b
    ephemeron regions probe regions.toml
    ephemeron regions probe regions.toml --write

    Starts a function in each region, which sends to the others as a run would: over TCP, or through the store.
    Prints [[link]] tables. Each link carries about four times --mb; traffic between regions may cost money.
    """
    from ephemeron import blocking
    from ephemeron.config.typed import plain
    from ephemeron.regions.probing import links_as_toml, probe_links, with_links
    from ephemeron.regions.region_files import load_regions

    known = load_regions(regions)
    links = blocking.run(lambda _: probe_links(known, nbytes=int(mb * 1e6)))
    if write:
        regions.write_text(with_links(regions.read_text(encoding="utf-8"), links), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"link": [plain(link) for link in links]}))
    elif not write:
        click.echo(links_as_toml(links), nl=False)


@regions.command("leave")
@click.argument("run")
@click.argument("region")
def leave_command(run: str, region: str) -> None:
    """Let REGION leave RUN, which goes on without it.

    \b
    ephemeron regions leave last chongqing

    The region sends one more round, and stops at a checkpoint. What it has contributed stays in the weights.
    """
    from ephemeron.regions.joining import leave

    name = leave(run, region)
    click.echo(f"region {region} leaves run {name} after its next round")


@regions.command("join")
@click.argument("run")
@click.argument("region")
@click.option(
    "--regions", "file", metavar="FILE", required=True, type=click.Path(path_type=Path), help="A regions.toml that describes REGION."
)
def join_command(run: str, region: str, file: Path) -> None:
    """Let REGION, which RUN does not have yet, join it while it trains.

    \b
    ephemeron regions join last chengdu --regions regions.toml

    The client of train starts its functions, which begin with a state of the run; the others train on meanwhile. FILE describes REGION as
    that of train does, and may hold the others, too: they are left alone. Without [region.data] it trains on a part of the job's samples.
    """
    from ephemeron.regions.joining import join

    name, functions = join(run, region, file)
    click.echo(f"region {region} is started with {human_count(functions, 'function')}, and joins run {name}")


@regions.command("replan")
@click.argument("run")
@click.option("--apply", "applies", is_flag=True, help="Ask the regions for the change.")
@click.option("--every", "every_s", type=click.FloatRange(min=1), metavar="SECONDS", help="Again and again, until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Print each plan as one line of JSON.")
def replan_command(run: str, applies: bool, every_s: float | None, as_json: bool) -> None:
    """Plan the functions of the regions of RUN anew, from measured iteration times.

    \b
    ephemeron regions replan last
    ephemeron regions replan last --apply --every 60

    Regions that would wait for the slowest one give functions back, and get them again when it has become faster. One that has become
    slower grows, up to what its devices have cores for. The samples of an iteration stay as many as they are. To have train do so
    by itself, write replan_every_s = 60 at the top of regions.toml, or [run.regions] replan_every_s in the job.
    """
    import time

    from ephemeron.config.typed import plain
    from ephemeron.errors import UserError
    from ephemeron.regions.online import replan

    begun = False
    while True:
        try:
            found = replan(run, apply=applies)
        except UserError:
            if not begun:
                raise
            return  # it has ended
        begun = True
        if as_json:
            click.echo(json.dumps(None if found is None else plain(found)))
        elif found is None:
            click.echo("not all regions have been measured yet")
        else:
            for each in found.regions:
                change = f"{human_count(each.workers, 'function')}" + (f" → {each.wanted}" if each.wanted != each.workers else "")
                click.echo(f"{each.name}: {each.iteration_s:.3g} s an iteration, {change}")
            saved = 1 - found.usd_per_hour / found.usd_per_hour_before if found.usd_per_hour_before else 0.0
            click.echo(f"{found.pass_s / found.pass_before_s:.3f} × the time, {saved:.1%} of cost saved")
        if every_s is None:
            return
        time.sleep(every_s)


def _show(found: RegionPlan) -> None:
    rows = [("region", "cores", "of", "devices", "load power", "of", "waits", "$/h")]
    for r in found.regions:
        devices = ", ".join(f"{d.cores} {d.kind}" for d in r.devices)
        rows.append(
            (
                r.name,
                f"{r.cores}",
                f"{r.available_cores}",
                devices,
                f"{r.load_power:.3f}",
                f"{r.available_load_power:.3f}",
                f"{r.waiting_share:.1%}",
                f"{r.usd_per_hour:.4g}" if r.usd_per_hour else "–",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [v.ljust(w) if i in (0, 3) else v.rjust(w) for i, (v, w) in enumerate(zip(row, widths, strict=True))]
        click.echo("  ".join(cells).rstrip())
    pace = f"{found.seconds / found.seconds_with_all:.3f} × the time of all devices"
    took = "" if found.relative else f"{found.seconds:.4g} s a pass, "
    cost = "" if found.cost_usd is None else f"${found.cost_usd:.4g} a pass, "
    click.echo(f"{found.method}: straggler {found.straggler}; {took}{cost}{pace}")
    click.echo(f"saved over all devices: {found.saved_cost_share:.1%} of cost, {found.saved_waiting_share:.1%} of waiting")
