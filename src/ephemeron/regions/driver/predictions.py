"""What a launch expects of each region before it trains: the time of an epoch, its cost, and the part of it that is a wait for the slowest region.

Exchanges are left out, of a region's functions with each other and of regions. Seconds are those of the simulator's compute model, or of the job's
profile on the region's platform, where there is one; otherwise only the ratio of the regions is known, from the power of their devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ephemeron.events import GroupStarted
from ephemeron.functions.base import Limits
from ephemeron.prices import Prices
from ephemeron.runs import folders
from ephemeron.runs.predictions import Prediction
from ephemeron.training.driver.launching.dry_runs import predict_run
from ephemeron.training.driver.launching.launch import PreparedRun
from ephemeron.training.job import Job, RunRegion
from ephemeron.units import human_seconds, human_usd

if TYPE_CHECKING:
    from ephemeron.regions.driver.launch import PreparedGroups


def with_predictions(
    started: Sequence[GroupStarted], groups: Sequence[RunRegion], members: Sequence[PreparedRun], job: Job, *, has_power: bool
) -> list[GroupStarted]:
    """The groups of a run with what is expected of them, as far as it is known.

    Args:
        started: the groups, as the first event has them.
        groups, members: the same, as configured and as prepared.
        job: of the run.
        has_power: whether the power of all groups is that of their devices.
    """
    known = [_epoch_s(member, job) for member in members]
    epochs_s = [seconds for seconds in known if seconds is not None]
    if len(epochs_s) == len(started):
        slowest = max(epochs_s)
        return [
            dataclasses.replace(
                g, predicted_waiting_share=1 - own / slowest, predicted_epoch_s=slowest, predicted_epoch_usd=_usd(g, slowest)
            )
            for g, own in zip(started, epochs_s, strict=True)
        ]
    if not has_power:
        return list(started)
    loads = [g.samples / (g.workers * _cores(group) * group.power) for g, group in zip(started, groups, strict=True)]
    return [dataclasses.replace(g, predicted_waiting_share=1 - load / max(loads)) for g, load in zip(started, loads, strict=True)]


def predict_groups(groups: PreparedGroups, on_progress: Callable[[str], None]) -> Prediction:
    """What a run in several regions will take: each region predicted as a run of its own, all of which train at the same time.

    Args:
        groups: the run, prepared.
        on_progress: told which region is tried.

    Raises:
        UserError: the first steps of a region are refused.
    """
    job, c = groups.request.job, groups.spec.configuration
    found = []
    for region, member in zip(c.regions.region, groups.members, strict=True):
        on_progress(f"two steps of region {region.name}")
        found.append(predict_run(member))
    times, costs, peaks = ([getattr(p, name) for p in found] for name in ("seconds", "cost_usd", "memory_mb"))
    calls = [p.invocations for p in found]
    whole = Prediction(
        kind="regions",
        name=job.name,
        platform="+".join(dict.fromkeys(p.platform for p in found)),
        seconds=None if None in times else max(times),
        cost_usd=None if None in costs else sum(costs),
        memory_mb=None if None in peaks else max(peaks),
        quota_mb=min(p.quota_mb for p in found),
        functions=sum(p.functions for p in found),
        invocations=None if None in calls else sum(n or 0 for n in calls),
        rests_on=tuple(dict.fromkeys(basis for p in found for basis in p.rests_on)),
        notes=(
            *dict.fromkeys(f"region {r.name}: {note}" for r, p in zip(c.regions.region, found, strict=True) for note in p.notes),
            f"exchanges between regions ({c.regions.sync}, every {c.regions.exchange_every} iterations) are left out",
        ),
        details={"regions": [{"region": r.name, **p.document()} for r, p in zip(c.regions.region, found, strict=True)]},
        rows=tuple((f"region {r.name}", _region_text(p)) for r, p in zip(c.regions.region, found, strict=True)),
    )
    return whole.within(budget_usd=job.limits.budget_usd)


def _region_text(p: Prediction) -> str:
    taken = "" if p.seconds is None or p.cost_usd is None else f"about {human_seconds(p.seconds)}, {human_usd(p.cost_usd)}; "
    return f"{taken}{p.functions} of {p.quota_mb:,} MB on {p.platform}, {p.details['iterations']} iterations"


def _cores(group: RunRegion) -> float:
    """Cores of a function, as plans count them."""
    return Limits().vcpus(group.memory_mb) if group.memory_mb else 1.0


def _usd(group: GroupStarted, seconds: float) -> float:
    """Price of its functions for so many seconds."""
    return Prices(**group.prices).functions_usd(group.workers * group.memory_mb / 1024 * seconds, 0)


def _epoch_s(member: PreparedRun, job: Job) -> float | None:
    """Seconds that the functions of a group compute in an epoch; None: not known."""
    spec, own = member.prepared.spec, member.prepared.job
    c = spec.configuration
    seconds = _step_s(own.simulation.compute.seconds if own.simulation.compute else None, job, c.platform)
    if seconds is None or not c.memory_mb:
        return None
    return spec.iterations / spec.epochs * c.exchange.local_steps * seconds(max(c.batch_size, c.nonaggregator_batch_size), c.memory_mb)


def _step_s(simulated: Callable[[float, float], float] | None, job: Job, platform: str) -> Callable[[float, float], float] | None:
    """Seconds of a step over so many samples with so many MB."""
    if platform == "simulated":
        return simulated
    if not any((folders.home() / "profiles").glob(f"{job.name}-{platform}-*")):
        return None
    from ephemeron.training.planning_workflow import measured_on

    profile = measured_on(job, platform)
    return None if profile is None else lambda samples, memory_mb: float(profile.workload.compute_s(samples, memory_mb))
