"""Profile and plan of a job.

A job's profile is stored in the home folder under a digest of what it depends on (model, loss, optimiser, data, code, number
type), so that the second `plan` or `train` of a job measures nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ephemeron.communication.channels.address import is_direct, store_address
from ephemeron.communication.channels.credentials import DIRECT
from ephemeron.errors import JobError, PlatformError, UserError
from ephemeron.events import Event, from_json
from ephemeron.functions.registry import CLOUDS, cloud
from ephemeron.runs import folders
from ephemeron.runs.folders import PLAN_FILE, PROFILE_FILE
from ephemeron.training.job import Job
from ephemeron.training.planner import Choice, Plan, PlanLimits, PlanRequest, make_plan
from ephemeron.training.planner.model.builtin import BUILTIN, MICROVM, builtin_platform
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, load_profile

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.provider import Settings

_log = logging.getLogger(__name__)

PUBLISHED: Mapping[str, tuple[str, ...]] = {"aws": BUILTIN, "aws-microvm": MICROVM}
"""Without a measured profile, all published ones of a cloud: the channel is left open."""
PLATFORMS = ("local", "simulated", *CLOUDS, *BUILTIN, *MICROVM)
CPU_PART = 0.8
"""Share of this machine's cores that the quotas of functions may have together."""


def digest(job: Job) -> str:
    """Digest of everything that the profile of a workload depends on."""
    parts = [repr((job.model, job.loss, job.optimizer, job.task, job.script, job.options, job.data, job.dtype, job.simulation))]
    for folder in job.code:
        for file in sorted(folder.rglob("*.py")):
            parts.append(f"{file.relative_to(folder)} {xxhash.xxh3_64_hexdigest(file.read_bytes())}")
    return xxhash.xxh3_64_hexdigest("\n".join(parts).encode())


def profile_path(job: Job, platform: str) -> Path:
    """Path of a job's stored profile."""
    return folders.home() / "profiles" / f"{job.name}-{platform}-{digest(job)}.json"


def known_or_measured(
    job: Job,
    *,
    platform: str,
    channel: str = "folder",
    use_cache: bool = True,
    measures: bool = True,
    on_progress: Callable[[str], None] = print,
) -> Profile:
    """The job's profile on a platform that can be probed from here: the stored one, or a new one, which is stored.

    Raises:
        UserError: the job or an argument is refused; or there is no stored profile, and `measures` is not set.
    """
    path = profile_path(job, f"{platform}-{_service(channel)}")
    if path.exists() and use_cache:
        try:
            known = load_profile(path)
        except JobError as e:
            _log.info("not using the profile in %s, which is of another release: %s", path, e)
        else:
            on_progress(f"using the profile of this job and code in {path}")
            return known
    if not measures:
        raise JobError(
            f"job {job.name!r}, as it is now, has no profile of platform {platform}; one is measured from some steps of it on this machine"
        )
    from ephemeron.training.profiling import profile_job

    profile = profile_job(job, platform=platform, channel=channel, use_cache=use_cache, on_progress=on_progress)
    keep(job, profile, platform=platform, channel=channel)
    return profile


def keep(job: Job, profile: Profile, *, platform: str, channel: str) -> Path:
    """Stores a job's profile for later plans of the same job and code; returns its path."""
    path = profile_path(job, f"{platform}-{_service(channel)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    return path


def measured_on(job: Job, platform: str, channel: str | None = None) -> Profile | None:
    """The profile that `ephemeron profile` has measured of a job on a cloud; None: none, or of another release.

    Args:
        job: with its code as it is now.
        platform: one of `registry.CLOUDS`.
        channel: address; None: the latest, over any channel.
    """
    name = f"{platform}-*" if channel is None else f"{platform}-{_service(channel)}"
    path = profile_path(job, name)
    found = sorted(path.parent.glob(path.name), key=lambda p: p.stat().st_mtime) if path.parent.is_dir() else []
    for file in reversed(found):
        try:
            return load_profile(file)
        except JobError as e:
            _log.info("not using the profile in %s, which is of another release: %s", file, e)
    return None


def profile_for(
    job: Job,
    platform: str,
    *,
    channel: str | None = None,
    use_cache: bool = True,
    measures: bool = True,
    on_progress: Callable[[str], None] = print,
) -> Profile:
    """The profile to plan from: what was measured on the platform, else on this machine, now if `measures`.

    Raises:
        JobError: a cloud without published figures, on which the job was not measured.
        UserError: the job or an argument is refused.
    """
    channel = None if channel is None else store_address(channel)
    if platform in CLOUDS:
        found = measured_on(job, platform, channel)
        if found is not None:
            return found
        if platform not in PUBLISHED:
            raise not_measured(job, platform)
    probed = platform if platform in ("local", "simulated") else "local"
    return known_or_measured(
        job, platform=probed, channel=channel or "folder", use_cache=use_cache, measures=measures, on_progress=on_progress
    )


def not_measured(job: Job, platform: str) -> JobError:
    """The error where a plan needs a profile of a cloud."""
    return JobError(
        f"job {job.name!r}, as it is now, was not measured on {platform}",
        remedy=f"run: ephemeron profile JOB --platform {platform} --channel ADDRESS; or choose yourself: --workers",
    )


def deployed_sizes(platform: str, settings: Settings | None = None) -> tuple[tuple[int, ...], str]:
    """Memory sizes that exist on a cloud's deployment, and why they are not known; none: any size.

    Args:
        platform: one of `PLATFORMS`.
        settings: where; None: the cloud's defaults.
    """
    if platform not in CLOUDS:
        return (), ""
    where = cloud(platform)
    try:
        return where.sizes((settings or where.settings()).located()), ""
    except (UserError, PlatformError) as e:
        return (), " ".join(str(e).split())


def platforms_for(
    name: str, measured: PlatformProfile, sizes_mb: Sequence[int] = (), channel: str | None = None
) -> tuple[PlatformProfile, ...]:
    """Platforms to plan for: the measured one, with its store and with its direct links, or built-in ones.

    Args:
        name: one of `PLATFORMS`.
        measured: of the profile.
        sizes_mb: memory sizes that are deployed; none: any.
        channel: address; None: left open. A direct one leaves those without links out, where there are others; any other one those
            with links.

    Raises:
        JobError: no such platform.
    """
    if name in ("local", "simulated"):
        return with_links(channel, on_this_machine(measured) if name == "local" else measured)
    if name == measured.name:
        return with_links(channel, measured.of_sizes(sizes_mb))
    if name in PUBLISHED:
        return with_links(channel, *(builtin_platform(n).of_sizes(sizes_mb) for n in PUBLISHED[name]))
    return (builtin_platform(name),)


def with_links(channel: str | None, *platforms: PlatformProfile) -> tuple[PlatformProfile, ...]:
    """Platforms, and those that were measured with direct links over them, as far as a channel is left open."""
    found = (*platforms, *filter(None, (p.over_links() for p in platforms)))
    if channel is None:
        return found
    same = tuple(p for p in found if (p.direct is not None) == is_direct(channel))
    return same or found


def addressed(choice: Choice, channel: str | None) -> dict[str, str]:
    """The channel of a plan's choice as an option of a run; nothing where the one that is given, or the default, is it.

    Args:
        choice: of a plan.
        channel: address that the user gives; of a direct channel that of its store is enough. None: none.
    """
    if choice.channel != "direct" or (channel is not None and is_direct(channel)):
        return {}
    return {"channel": "direct" if channel in (None, "folder") else f"{DIRECT}{channel}"}


def scaled(profile: Profile, platforms: Sequence[PlatformProfile]) -> Profile:
    """The profile with computing times for platforms whose vCPUs come with another memory than where it was measured."""
    (ratio,) = {p.mb_per_vcpu / profile.platform.mb_per_vcpu for p in platforms}
    w = profile.workload
    return dataclasses.replace(profile, workload=dataclasses.replace(w, a=w.a * ratio, m=w.m * ratio))


def on_this_machine(platform: PlatformProfile) -> PlatformProfile:
    """The platform with a limit on the sum of quotas: beyond it, functions on this machine's cores slow each other down."""
    total = CPU_PART * (os.cpu_count() or 1) * platform.mb_per_vcpu
    return dataclasses.replace(platform, total_memory_mb=total)


def limits_of(job: Job | None) -> PlanLimits:
    """Limits of a job."""
    if job is None:
        return PlanLimits()
    return PlanLimits(deadline_s=job.limits.deadline_s, budget_usd=job.limits.budget_usd, max_global_batch=job.limits.max_global_batch)


def plan_job(
    job: Job,
    wish: PlanRequest | None = None,
    *,
    platform: str = "local",
    channel: str | None = None,
    profile: Profile | None = None,
    prices_file: Path | None = None,
    use_cache: bool = True,
    on_progress: Callable[[str], None] = lambda text: None,
    settings: Settings | None = None,
) -> Plan:
    """Finds the best configuration of a job.

    Args:
        job: what to train, with its limits.
        wish: limits, objective and fixed options; None: the job's limits, at least cost.
        platform: `local`, `simulated`, a cloud, or one built-in profile. On a cloud, what was measured there counts before what
            is published, and the sizes that are deployed are searched.
        channel: address, for platforms that are probed.
        profile: instead of measuring.
        prices_file: instead of the profile's prices.
        use_cache: reuse the profile of an earlier measurement; False: measure again.
        on_progress: called with what is being measured.
        settings: where on a cloud; None: its defaults.

    Raises:
        PlanInfeasible: nothing meets the limits.
        UserError: the job or an argument is refused.
    """
    if platform not in PLATFORMS:
        raise JobError(f"platform = {platform!r} is not known", remedy=f"use one of {', '.join(PLATFORMS)}")
    if profile is None:
        profile = profile_for(job, platform, channel=channel, use_cache=use_cache, on_progress=on_progress)
    sizes, _ = deployed_sizes(platform, settings)
    wish = wish or PlanRequest(
        epochs=job.epochs,
        hap_epochs_factor=job.limits.hap_epochs_factor,
        optimizer=job.optimizer if job.task is None else None,
        limits=limits_of(job),
    )
    platforms = platforms_for(platform, profile.platform, sizes, channel)
    return make_plan(scaled(profile, platforms), wish, platforms=platforms, prices_file=prices_file)


def profile_of_run(run_id: str) -> Profile:
    """The profile that a run was planned with, corrected by the run's measurements.

    Raises:
        RunNotFound: no such run.
        JobError: it was not planned, or has no events.
    """
    from ephemeron.training.profiling import refine

    folder = folders.find(run_id, kinds=folders.MODELS)
    path = folder.path / PROFILE_FILE
    if not path.exists():
        raise JobError(f"run {folder.run_id} had no profile", remedy="runs that were planned have one: train without configuration")
    return refine(load_profile(path), events_of(folder.events))


def events_of(path: Path) -> Sequence[Event]:
    """Events of a run. Lines that are cut off or of another release are skipped."""
    found = []
    with path.open() as lines:
        for line in lines:
            try:
                found.append(from_json(line))
            except (ValueError, TypeError, KeyError):
                continue
    return found


def plan_of(path: Path) -> dict[str, object] | None:
    """`plan.json` of a run folder; None: it was not planned."""
    try:
        value: dict[str, object] = json.loads((path / PLAN_FILE).read_text())
        return value
    except (OSError, ValueError):
        return None


def _service(channel: str) -> str:
    """Scheme of the address of a channel's store. Credentials and hosts do not belong in file names."""
    return "".join(c if c.isalnum() else "-" for c in store_address(channel).partition("://")[0])
