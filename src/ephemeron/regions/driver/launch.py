"""Preparation of a run with several groups of functions: each group is prepared as a run of its own, on its share of the samples.

What a launch expects of each region before it trains: the time of an epoch, its cost, and the part of it that is a wait for the slowest region.

Exchanges are left out, of a region's functions with each other and of regions. Seconds are those of the simulator's compute model, or of the job's
profile on the region's platform, where there is one; otherwise only the ratio of the regions is known, from the power of their devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ephemeron.communication.channels import public_address
from ephemeron.communication.channels.credentials import environment
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.data.flow_spec import DataProvider
from ephemeron.data.user_function import call
from ephemeron.errors import JobError
from ephemeron.events import GroupStarted, Traffic
from ephemeron.functions.base import Limits
from ephemeron.functions.registry import CLOUDS
from ephemeron.functions.registry import cloud as cloud_of
from ephemeron.prices import Prices
from ephemeron.regions.driver.network_options import check_network, network_of, variables_of
from ephemeron.regions.policies import checked_sync
from ephemeron.runs import folders
from ephemeron.runs.predictions import Prediction
from ephemeron.training.driver.launching.dry_runs import predict_run
from ephemeron.training.driver.launching.launch import LaunchRequest, PreparedRun, prepared_run
from ephemeron.training.driver.launching.training_data import training_data
from ephemeron.training.job import Configuration, Fault, Job, RunRegion, sync_name
from ephemeron.training.worker.spec import GroupMembership, RunSpec
from ephemeron.units import human_seconds, human_usd

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings

_OF_GROUPS = ("regions", "platform", "channel", "workers", "aggregators", "memory_mb", "memory_is_default", "function_timeout_s")
"""Options that a group has itself, or that are of all groups together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedGroups:
    """Groups that were checked, and have no folders yet."""

    run_id: str
    request: LaunchRequest
    members: tuple[PreparedRun, ...]
    spec: RunSpec
    """Of the run as a whole, for records and reports."""
    store: str
    """Address of the common store; empty: a folder of the run."""
    again: tuple[Callable[[], PreparedRun], ...]
    """For each group: asks its platform again, and prepares it as it is admitted then.

    Raises:
        UserError, PlatformError: it is refused.
    """

    @property
    def simulated(self) -> bool:
        return self.members[0].simulated

    def described(self) -> list[GroupStarted]:
        """The groups for the first event of the run."""
        found, first = [], 0
        for group, member in zip(self.spec.configuration.regions.region, self.members, strict=True):
            found.append(described_group(group, member, first))
            first += found[-1].workers
        for i, started in enumerate(found):
            if started.most_workers > started.workers:
                found[i] = dataclasses.replace(started, more_ranks=first)
                first += started.most_workers - started.workers
        c = self.spec.configuration
        has_power = c.regions.plan is not None or any(group.power != 1.0 for group in c.regions.region)
        return with_predictions(found, c.regions.region, self.members, self.request.job, has_power=has_power)


def described_group(group: RunRegion, member: PreparedRun, first_rank: int) -> GroupStarted:
    """A group for the events of the run.

    Args:
        group, member: the group, and the same as prepared.
        first_rank: of its ranks in the run.
    """
    spec, objects = member.prepared.spec, member.prepared.objects
    c = spec.configuration
    return GroupStarted(
        name=group.name,
        platform=c.platform,
        first_rank=first_rank,
        workers=c.workers,
        memory_mb=c.memory_mb,
        iterations=spec.iterations,
        samples=spec.samples,
        servers=spec.servers,
        prices=dataclasses.asdict(spec.prices),
        traffic=Traffic(puts=len(objects), bytes_up=sum(map(size_of, objects.values()))),
        most_workers=group.most_workers,
    )


def refuse_unfit(job: Job, c: Configuration) -> None:
    """Refuses what does not work with several groups.

    Raises:
        JobError: names the option.
    """
    groups = c.regions.region
    if c.regions.file is not None:
        raise JobError(f"the file of regions {c.regions.file} was not read", remedy="make the configuration with configure(job, regions=…)")
    names = [group.name for group in groups]
    if len(groups) < 2:
        raise JobError("run.regions.region has one region", remedy="name two regions, or leave regions out")
    for name in names:
        if names.count(name) > 1:
            raise JobError(f"run.regions.region has two regions of the name {name!r}", remedy="give each a name of its own")
    sync, _ = sync_name(c.sync)
    refused = {
        f"sync '{c.sync}'": sync != "bsp",
        "pattern 'parameter-server'": c.pattern == "parameter-server",
        "stages": c.stages.count > 1 or bool(c.stages.placement),
        "schedule of functions": bool(c.resize.schedule),
        "a script": job.script is not None,
        "ema_decay": bool(job.options.ema_decay),
        "early_stopping": job.options.early_stopping is not None,
        "keep_best": job.options.keep_best is not None,
        "[limits] deadline_s": job.limits.deadline_s is not None,
    }
    for what, given in refused.items():
        if given:
            raise JobError(f"{what} is not for a run in several regions", remedy="leave it out, or leave regions out")
    for group in groups:
        channel = group.channel or c.channel
        if channel.startswith(("ps://", "parameter_server")):
            raise JobError(f"region {group.name}: channel '{channel}' is not for regions", remedy="use an object store or a cache")
    group_sync(c)
    check_network(c)
    _check_replanning(c)
    platforms: set[str] = {group.platform or c.platform for group in groups}
    if "simulated" in platforms and len(platforms) > 1:
        raise JobError("simulated regions and real ones cannot train together", remedy="simulate all regions or none")
    _check_store(c, platforms)


def _check_replanning(c: Configuration) -> None:
    """Refuses new plans for groups whose functions cannot change."""
    every_s = c.regions.replan_every_s
    if not every_s:
        return
    if every_s < 1:
        raise JobError(f"regions.replan_every_s = {every_s:g} is too often", remedy="give 1 or more, or 0 for none")
    if c.pattern == "standalone":
        raise JobError("regions.replan_every_s is not for pattern 'standalone'", remedy="leave one of them out")
    for group in c.regions.region:
        if group.nonaggregator_batch_size not in (0, group.batch_size or c.batch_size):
            raise JobError(
                f"region {group.name}: functions with different batches cannot be divided anew",
                remedy="leave nonaggregator_batch_size out, or regions.replan_every_s",
            )


def group_sync(c: Configuration) -> Any:
    """The policy by which the groups exchange, of `ephemeron.regions`, which is above training and found by name.

    Raises:
        JobError: the policy, its options and the compression do not go together.
    """
    every = [group.exchange_every or c.regions.exchange_every for group in c.regions.region]
    return checked_sync(c.regions.sync, c.regions.compression, min(every))


def _check_store(c: Configuration, platforms: set[str]) -> None:
    if platforms == {"simulated"}:
        if c.regions.store:
            raise JobError("regions.store is not for simulated regions", remedy="leave it out: the simulator has its own")
    elif platforms == {"local"} and not c.regions.store:
        return
    elif not c.regions.store:
        raise JobError(
            "regions on several platforms need a store that all of them reach", remedy="give regions.store, such as s3://bucket/prefix"
        )
    elif "://" not in c.regions.store or c.regions.store.startswith("ps://"):
        raise JobError(f"regions.store '{c.regions.store}' is no store for regions", remedy="use an object store or a cache")
    elif public_address(c.regions.store)[1]:
        raise JobError("credentials do not belong in regions.store", remedy="set the environment variables of its service")


def prepared_groups(request: LaunchRequest) -> PreparedGroups:
    """Checks all groups and makes their objects. Nothing is stored or started.

    Raises:
        UserError: the run is refused.
    """
    from ephemeron.training.driver.api import configured

    job, c = request.job, request.configuration
    refuse_unfit(job, c)
    if request.plan is not None:
        raise JobError("a plan is not for a run in several regions", remedy="leave it out")
    run_id = folders.new_run_id(job.name)
    configurations = [configured(member_values(c, group)) for group in c.regions.region]
    first_ranks = np.cumsum([0, *(each.workers for each in configurations)])
    for fault in request.faults:
        if fault.rank >= first_ranks[-1]:
            raise JobError(f"fault {fault}: there is no rank {fault.rank}", remedy=f"ranks are 0 to {first_ranks[-1] - 1}")
    positions = _positions(job, c.regions.region, configurations)
    members, again = [], []
    for i, (group, own, part) in enumerate(zip(c.regions.region, configurations, positions, strict=True)):
        again.append(
            partial(
                prepared_member,
                dataclasses.replace(
                    request,
                    job=job_of(job, group, own.workers / first_ranks[-1]),
                    configuration=own,
                    loggers=(),
                    prices_file=group.prices or request.prices_file,
                    cloud=cloud_of_group(request, own),
                    faults=_faults_of(request.faults, int(first_ranks[i]), own.workers),
                ),
                group,
                run_id=f"{run_id}-{group.name}",
                part=part,
            )
        )
        members.append(again[-1](may_wait=True))
    refused = [member.refusal for member in members if member.refusal is not None]
    if refused and len(members) - len(refused) < c.regions.least_regions:
        raise refused[0]
    for group, member in zip(c.regions.region, members, strict=True):
        if member.prepared.spec.shares_evaluations:
            raise JobError(
                f"region {group.name}: metrics that decide or are no means are not for several regions",
                remedy="use metrics that are means over samples",
            )
    names = tuple(group.name for group in c.regions.region)
    store = c.regions.store
    if not store and not members[0].simulated:
        store = (folders.runs_folder() / run_id / "objects").resolve().as_uri()
    every = matched_every(c, [member.prepared.spec.iterations for member in members])
    rounds = min((m.prepared.spec.iterations - 1) // h for m, h in zip(members, every, strict=True))
    memberships = [
        GroupMembership(
            run=run_id,
            store=store,
            index=i,
            names=names,
            every=h,
            rounds=rounds,
            sync=c.regions.sync,
            compression=c.regions.compression,
            network=network_of(c, c.regions.region[i]),
            iterations=tuple(m.prepared.spec.iterations for m in members),
        )
        for i, h in enumerate(every)
    ]
    members = [member.in_group(m) for member, m in zip(members, memberships, strict=True)]
    later = tuple(partial(in_group, each, m) for each, m in zip(again, memberships, strict=True))
    first = members[0].prepared.spec
    whole = dataclasses.replace(
        first,
        run_id=run_id,
        group=None,
        samples=sum(m.prepared.spec.samples for m in members),
        configuration=dataclasses.replace(first.configuration, workers=int(first_ranks[-1]), regions=c.regions),
        budget_usd=job.limits.budget_usd,
        faults=tuple(map(str, request.faults)),
    )
    return PreparedGroups(run_id=run_id, request=request, members=tuple(members), spec=whole, store=store, again=later)


def in_group(prepare: Callable[[], PreparedRun], membership: GroupMembership) -> PreparedRun:
    return prepare().in_group(membership)


def _positions(job: Job, groups: Sequence[RunRegion], configurations: Sequence[Configuration]) -> list[list[int] | None]:
    """For each group the positions of its part of the job's training samples; None: it has samples of its own.

    Raises:
        JobError: a group gets no samples, or has some of its own and the job's task names its samples, too.
    """
    sharing = [
        (i, group.share or own.global_batch)
        for i, (group, own) in enumerate(zip(groups, configurations, strict=True))
        if group.data is None
    ]
    found: list[list[int] | None] = [None] * len(groups)
    if not sharing:
        return found
    parts = divide(training_data(job).samples, [share for _, share in sharing], seed=job.seed)
    for (i, _), part in zip(sharing, parts, strict=True):
        if not part:
            raise JobError(f"region {groups[i].name} has no training samples", remedy="give it a larger share, or leave it out")
        found[i] = part
    return found


def prepared_member(
    request: LaunchRequest, group: RunRegion, *, run_id: str, part: Sequence[int] | None, may_wait: bool = False
) -> PreparedRun:
    """A group as a run of its own. What is wrong with samples of its own is said with its name."""
    variables = variables_of(group.credentials, f"region {group.name}")
    with environment(variables):
        if group.data is None:
            found = prepared_run(request, run_id=run_id, part=part, may_wait=may_wait)
        else:
            try:
                found = prepared_run(request, run_id=run_id, may_wait=may_wait)
            except JobError as e:
                raise JobError(f"region {group.name}: {e.problem}", remedy=e.remedy) from None
    return dataclasses.replace(found, secrets={**variables, **found.secrets})


def matched_every(c: Configuration, iterations: Sequence[int]) -> list[int]:
    """H of each group. Where a group gives none, its exchanges are at the same parts of its iterations as those of the shortest group.

    Groups whose iterations are in proportion to their speed so compute equally long between two exchanges, and none waits.

    Args:
        c: configuration of the run.
        iterations: of each group's run.
    """
    sync, least = group_sync(c), min(iterations)
    wanted = [
        group.exchange_every or max(1, round(c.regions.exchange_every * count / least))
        for group, count in zip(c.regions.region, iterations, strict=True)
    ]
    if sync.auto:  # plans are in iterations of the first group, of which others take their proportion
        return [wanted[0]] * len(wanted)
    return [sync.every(h) for h in wanted]


def member_values(c: Configuration, group: RunRegion) -> dict[str, object]:
    """Options of a group's own configuration."""
    values = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name not in _OF_GROUPS}
    values["nonaggregator_batch_size"] = group.nonaggregator_batch_size
    values["stages"] = dataclasses.replace(c.stages, replicas=0)
    values |= {
        "platform": group.platform or c.platform,
        "channel": group.channel or c.channel,
        "workers": group.workers,
        "aggregators": group.aggregators,
        "memory_mb": group.memory_mb,
        "function_timeout_s": group.function_timeout_s,
        "batch_size": group.batch_size or c.batch_size,
    }
    return values


def divide(samples: int, shares: Sequence[float], *, seed: int) -> list[list[int]]:
    """Positions of the training samples of each group: a random order, cut in proportion to the shares.

    Args:
        samples: number of training samples.
        shares: of the groups, positive.
        seed: of the order.
    """
    order = np.random.default_rng([seed % 2**64, 0x67726F75]).permutation(samples)
    cuts = np.rint(np.cumsum(shares) / np.sum(shares) * samples).astype(int)
    return [sorted(part.tolist()) for part in np.split(order, cuts[:-1])]


def job_of(job: Job, group: RunRegion, part: float) -> Job:
    """The job of a group: its samples, its part of the budget, and the speed of its devices in the simulator."""
    budget, compute = job.limits.budget_usd, job.simulation.compute
    if group.data is not None:
        if job.task is not None and _names_samples(job):
            raise JobError(
                f"region {group.name} has samples of its own, and task {job.task.target} names samples, too", remedy="leave one of them out"
            )
        job = dataclasses.replace(job, data=group.data)
    if budget is not None:
        job = dataclasses.replace(job, limits=dataclasses.replace(job.limits, budget_usd=budget * part))
    if compute is not None and group.power != 1.0:
        faster = dataclasses.replace(compute, a=compute.a / group.power)
        job = dataclasses.replace(job, simulation=dataclasses.replace(job.simulation, compute=faster))
    return job


def _names_samples(job: Job) -> bool:
    assert job.task is not None
    from ephemeron.data.flow.from_job import TRAIN_DATA, provided

    provider = DataProvider(target=job.task.target, options=job.task.options)
    task = provided(provider, job.code)
    return call(f"{job.task.target}.{TRAIN_DATA}", getattr(task, TRAIN_DATA), {}, job.code) is not None


def cloud_of_group(request: LaunchRequest, c: Configuration) -> Settings | None:
    given = request.cloud
    if given is None or c.platform not in CLOUDS:
        return None
    each = given if isinstance(given, Sequence) else (given,)
    return next((settings for settings in each if isinstance(settings, cloud_of(c.platform).settings)), None)


def _faults_of(faults: Sequence[Fault], first: int, workers: int) -> list[Fault]:
    return [
        dataclasses.replace(f, rank=f.rank - first, to=f.to - first if f.kind == "cut" else 0)
        for f in faults
        if first <= f.rank < first + workers
    ]


# -- what a launch expects of each region before it trains --------------------------------------------------------


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
