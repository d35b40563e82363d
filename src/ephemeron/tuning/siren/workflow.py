"""Learned schedules of a job: from the job to a policy that is stored, and from a policy to the options of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ephemeron.config.typed import build
from ephemeron.errors import JobError
from ephemeron.events import RunStarted
from ephemeron.functions.base import Limits
from ephemeron.runs import folders
from ephemeron.runs.folders import RESULT_FILE
from ephemeron.training import planning_workflow
from ephemeron.training.job import Configuration, Job
from ephemeron.training.job.run_options import merged, nested
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.profiling.simulated import world_profile
from ephemeron.training.task.learned_schedule import ActionBounds
from ephemeron.tuning.siren.environment import EnvironmentSpec, Noise
from ephemeron.tuning.siren.epoch_model import EpochModel
from ephemeron.tuning.siren.policy import SavedPolicy, load_policy

LEARNED = "learned"
"""Value of `--schedule` for a policy that is trained, or reused."""
MOST_WORKERS = 32
"""Largest number of functions, unless the job's largest global batch or the platform says less."""
MOST_QUOTAS = 24
"""Memory sizes that are told apart."""
CHOSEN = ("workers", "memory_mb")
"""Options that the schedule chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRun:
    """How a job runs by a policy."""

    options: Mapping[str, Any]
    """Of its `Configuration`."""
    note: str
    """One line for the user: what is predicted, and which schedule is used."""
    policy: SavedPolicy
    profile: Profile


def learned_run(
    job: Job,
    schedule: str,
    flags: Mapping[str, object],
    *,
    sizes_mb: Sequence[int] = (),
    seed: int = 0,
    steps: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> LearnedRun:
    """The options of a run by a learned schedule.

    Args:
        job: what to train.
        schedule: `learned`, or the path of a saved policy.
        flags: options of the run that the user gives.
        sizes_mb: memory sizes that are deployed on a cloud; none: any.
        seed, steps: of the training of a policy.
        on_progress: called with what is being done.

    Raises:
        JobError: the job does not allow it, or the policy is of another job.
        PlanInfeasible: the target cannot be reached within the budget.
        MissingExtra: a library is not installed.
    """
    c = allowed(job, flags)
    profile = planning_workflow.profile_for(job, c.platform, channel=c.store, on_progress=on_progress)
    platforms = planning_workflow.platforms_for(c.platform, profile.platform, sizes_mb, c.channel)
    profile = dataclasses.replace(planning_workflow.scaled(profile, platforms[:1]), platform=platforms[0])
    if schedule == LEARNED:
        path = policy_path(job, c)
        if path.exists():
            on_progress(f"using the policy of this job, code and budget in {path}")
            policy = load_policy(path)
        else:
            policy = train_policy(job, c, profile, seed=seed, steps=steps, path=path, on_progress=on_progress)
    else:
        policy = load_policy(Path(schedule))
    check_policy(policy, job, c, where=schedule)
    compared = policy.comparison
    options = {"sync": c.sync, "batch_size": c.batch_size} | policy.options(compared.used.name)
    return LearnedRun(options=options, note=compared.sentence(), policy=policy, profile=profile)


def allowed(job: Job, flags: Mapping[str, object]) -> Configuration:
    """The configuration as far as the job and the user give it, if it can be run by a learned schedule.

    Raises:
        JobError: names what excludes it.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    for name in CHOSEN:
        if name in given:
            raise JobError(f"--{name.replace('_', '-')} and a learned schedule both choose the functions", remedy="leave one of them out")
    own = {name: value for name, value in job.run.items() if name not in CHOSEN}
    c = build(Configuration, nested({"sync": "hsp", **merged(own, given)}), where="configuration")
    excluded = {
        "a script with a loop of its own": job.script is not None,
        "a model on several functions": c.stages.count > 1 or bool(c.stages.placement),
        "regions": c.regions.given,
        f"pattern '{c.pattern}'": c.pattern != "k-reduce",
        f"sync '{c.sync}'": c.sync not in ("hsp", "bsp"),
        "sync 'bsp' and sampling 'global', whose functions change within epochs": c.sync == "bsp" and job.data.sampling == "global",
        "local steps": c.exchange.local_steps > 1,
        f"compression '{c.exchange.compression}'": c.exchange.compression != "none",
        "another schedule, a policy or adapt": bool(c.resize.schedule) or c.resize.asks,
        "a larger batch of those that do not aggregate": c.nonaggregator_batch_size not in (0, c.batch_size),
    }
    for what, found in excluded.items():
        if found:
            raise JobError(f"a learned schedule is not possible with {what}", remedy="leave it out, or leave --schedule out")
    if job.limits.budget_usd is None:
        raise JobError("a learned schedule needs a budget", remedy="give [limits] budget_usd, or --budget-usd")
    early = job.early_stopping
    if early is None or early.threshold is None or early.mode != "min" or early.threshold <= 0:
        raise JobError(
            "a learned schedule needs a loss at which the run ends",
            remedy='give [early_stopping] monitor = "loss" and threshold, with mode "min"',
        )
    if job.evaluate_every not in ("1 epoch", "1 epochs"):
        raise JobError(
            f"a learned schedule needs an evaluation after every epoch, and evaluate_every is '{job.evaluate_every}'",
            remedy="leave evaluate_every out",
        )
    return dataclasses.replace(c, aggregators=c.aggregators or 2)


def identity(job: Job) -> str:
    """Name of a job, and a digest of all that its losses and epochs depend on."""
    return f"{job.name} {planning_workflow.digest(job)}"


def policy_path(job: Job, c: Configuration) -> Path:
    """Path of the stored policy of a job in a configuration."""
    parts = (job.limits, job.epochs, job.early_stopping, c.platform, c.channel, c.sync, c.batch_size, c.aggregators)
    key = xxhash.xxh3_64_hexdigest(f"{identity(job)} {parts!r}".encode())
    return folders.home() / "policies" / f"{job.name}-{c.platform}-{key}.json"


def check_policy(policy: SavedPolicy, job: Job, c: Configuration, *, where: str) -> None:
    """Refuses a policy that was trained for something else.

    Raises:
        JobError: names what.
    """
    spec, early = policy.environment, job.early_stopping
    assert early is not None
    if spec.job != identity(job):
        raise JobError(
            f"policy {where} is of job {spec.job.partition(' ')[0]!r} as it was then, not of {job.name!r} as it is now",
            remedy="say --schedule learned",
        )
    pairs = {
        "a budget of $": (spec.budget_usd, job.limits.budget_usd),
        "a target of ": (spec.target_loss, early.threshold),
        "batches of ": (spec.batch_size, c.batch_size),
        "epochs: ": (spec.epochs, job.epochs),
    }
    for what, (trained, asked) in pairs.items():
        if trained != asked:
            raise JobError(f"policy {where} was trained for {what}{trained:g}, not {asked:g}", remedy="say --schedule learned")


def bounds_of(job: Job, c: Configuration, profile: Profile) -> ActionBounds:
    """Functions that the schedule of a job may choose.

    Raises:
        JobError: no memory size holds a batch.
    """
    platform, workload = profile.platform, profile.workload
    most = min(MOST_WORKERS, platform.concurrency, max(1, workload.samples // c.batch_size))
    if job.limits.max_global_batch is not None:
        most = max(1, min(most, job.limits.max_global_batch // c.batch_size))
    needed = float(workload.memory_needed_mb(c.batch_size))
    useful = workload.vcpus * platform.mb_per_vcpu
    quotas = [int(q) for q in platform.quotas() if q >= needed]
    if useful:
        quotas = [q for i, q in enumerate(quotas) if i == 0 or quotas[i - 1] < useful]
    if not quotas:
        raise JobError(f"a batch needs {needed:.0f} MB, more than a function can have", remedy="use smaller batches")
    if platform.total_memory_mb:
        quotas = [q for q in quotas if q <= platform.total_memory_mb] or quotas[:1]
        most = max(1, min(most, int(platform.total_memory_mb // quotas[0])))
    thinned = np.unique(np.linspace(0, len(quotas) - 1, min(len(quotas), MOST_QUOTAS)).round().astype(int))
    return ActionBounds(most_workers=most, quotas_mb=tuple(quotas[i] for i in thinned), total_memory_mb=platform.total_memory_mb)


def environment_of(
    job: Job, c: Configuration, profile: Profile, *, on_progress: Callable[[str], None] = lambda text: None
) -> EnvironmentSpec:
    """The environment of a job, with a loss curve and corrections from simulated runs with real gradients.

    Args:
        job, c: see `allowed`.
        profile: of the job on the platform.
        on_progress: called with a line for each run.
    """
    from ephemeron.tuning.siren.fitting import fitted

    early, budget = job.early_stopping, job.limits.budget_usd
    assert early is not None
    assert early.threshold is not None
    assert budget is not None
    bounds = bounds_of(job, c, profile)
    memory_mb = min(bounds.quotas_mb, key=lambda q: abs(q - profile.platform.mb_per_vcpu))
    curve, seconds, cost = fitted(
        job,
        simulated_model(job, c, profile, bounds),
        least=bounds.least_workers,
        most=bounds.most_workers,
        memory_mb=memory_mb,
        sync=c.sync,
        batch_size=c.batch_size,
        aggregators=c.aggregators,
        samples=profile.workload.samples,
        on_progress=on_progress,
    )
    judged = "a simulated run that was not fitted" if curve.held_out else "the simulated runs that were fitted"
    on_progress(
        f"loss curve: mean error {curve.error:.0%} of losses, {curve.epochs_error:.0%} of epochs; epochs: {seconds.error:.0%} of time, "
        f"{cost.error:.0%} of cost, against {judged}"
    )
    return EnvironmentSpec(
        job=identity(job),
        profile=profile,
        curve=curve,
        target_loss=early.threshold,
        budget_usd=budget,
        epochs=job.epochs,
        batch_size=c.batch_size,
        aggregators=c.aggregators,
        bounds=bounds,
        monitor=early.monitor,
        seconds=seconds,
        cost=cost,
        reference_s=1.0,
        noise=Noise(loss_spread=curve.scatter),
    )


def simulated_model(job: Job, c: Configuration, profile: Profile, bounds: ActionBounds) -> EpochModel:
    """Epochs as the performance model predicts them for the simulator: what simulated runs correct, whatever the job's own platform is.

    Args:
        job, c: see `allowed`.
        profile: of the job on its platform.
        bounds: of its functions.
    """
    workload, compute = profile.workload, job.simulation.compute
    if compute is not None:
        workload = dataclasses.replace(workload, a=compute.a, b=compute.b, m=compute.m)
    world = dataclasses.replace(profile, workload=workload, platform=world_profile(job.simulation, Limits()))
    return EpochModel(world, bounds, batch_size=c.batch_size, aggregators=c.aggregators)


def train_policy(
    job: Job,
    c: Configuration,
    profile: Profile,
    *,
    seed: int = 0,
    steps: int | None = None,
    path: Path,
    on_progress: Callable[[str], None] = lambda text: None,
) -> SavedPolicy:
    """Trains and stores a policy for a job.

    Args:
        job, c: see `allowed`.
        profile: of the job on the platform.
        seed, steps: of the training; None: the default number.
        path: of the document; the library's file is beside it.
        on_progress: called with what is being done.
    """
    from ephemeron.tuning.siren.learning import STEPS, learn

    spec = environment_of(job, c, profile, on_progress=on_progress)
    policy, model = learn(spec, seed=seed, steps=STEPS if steps is None else steps, on_progress=on_progress)
    store(policy, model, path)
    on_progress(f"stored the policy in {path}")
    return policy


def store(policy: SavedPolicy, model: Any, path: Path) -> None:
    """Writes a policy's two files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(path.with_suffix(".zip"))
    policy.save(path)


def fine_tune(
    path: Path,
    runs: Sequence[str],
    *,
    out: Path,
    seed: int = 0,
    steps: int | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> SavedPolicy:
    """A policy that goes on from a saved one, in its environment corrected by what real runs have measured.

    Args:
        path: of the saved policy; the library's file is beside it.
        runs: names of finished runs of the policy's job.
        out: path of the new policy.
        seed, steps: of the training; None: the default number.
        on_progress: called with what is being done.

    Raises:
        JobError: a run is of another job, or has no result.
        RunNotFound: there is no such run.
    """
    from ephemeron.tuning.siren.fitting import refined
    from ephemeron.tuning.siren.learning import STEPS, learn

    policy = load_policy(path)
    name = policy.environment.job.partition(" ")[0]
    measured = []
    for run in runs:
        folder = folders.find(run, kinds=folders.MODELS)
        seen = planning_workflow.events_of(folder.events)
        of = next((e.job for e in seen if isinstance(e, RunStarted)), "")
        if of != name:
            raise JobError(f"run {folder.run_id} is of job {of!r}, and the policy of {name!r}", remedy="name other runs")
        try:
            cost_usd = float(json.loads((folder.path / RESULT_FILE).read_text())["cost_usd"])
        except (OSError, ValueError, KeyError):
            raise JobError(f"run {folder.run_id} has no result", remedy="name a run that has ended") from None
        measured.append((seen, cost_usd))
    spec = refined(policy.environment, measured)
    zipped = path.with_suffix(".zip")
    tuned, model = learn(
        spec,
        seed=seed,
        steps=STEPS if steps is None else steps,
        imitate=False,
        start=zipped if zipped.exists() else None,
        measured_runs=policy.training.measured_runs + len(runs),
        on_progress=on_progress,
    )
    store(tuned, model, out)
    return tuned
