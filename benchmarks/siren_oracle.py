"""The simulator as the oracle of an environment of learned schedules: runs with real gradients in virtual time whose functions change
between epochs, and the same policy in both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ephemeron.errors import RunFailed
from ephemeron.events import Event, GenerationStarted, Measured, RunStarted
from ephemeron.training.driver import configure, train
from ephemeron.training.job import Job
from ephemeron.tuning.siren.baselines import Outcome, outcome_of
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, change
from ephemeron.tuning.siren.fitting import other_home
from ephemeron.tuning.siren.learning import chooser
from ephemeron.tuning.siren.policy import SavedPolicy
from ephemeron.tuning.siren.schedules import asked

CHANGES = (1, 6, 3, 8)
"""Functions of a run with a fixed schedule, by two epochs each."""
MEMORY_MB = 1792


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run in virtual time."""

    seconds: float
    cost_usd: float
    losses: tuple[float, ...]
    """After each epoch."""
    functions: tuple[tuple[int, int], ...]
    """Number and memory of each epoch."""


def simulated_run(
    job: Job, spec: EnvironmentSpec, *, sizes: Sequence[tuple[int, int]] = (), policy: SavedPolicy | None = None, name: str = "network"
) -> SimulatedRun:
    """A simulated run with real gradients.

    Args:
        job: what to train, with its compute model.
        spec: its environment.
        sizes: number and memory of the functions of each epoch, of a run that does not end early.
        policy: chooses them instead, until the target or the end of its budget.
        name: of the policy's schedule.

    Raises:
        RunFailed: it failed, or its budget was spent.
    """
    limits = dataclasses.replace(job.limits, budget_usd=None)
    if policy is None:
        workers, memory_mb = sizes[0]
        options: dict[str, Any] = {"workers": workers, "memory_mb": memory_mb, "aggregators": min(spec.aggregators, workers)}
        job = dataclasses.replace(job, early_stopping=None, epochs=len(sizes), limits=limits)
        changes = [
            {"from_epoch": i, "workers": w, "memory_mb": m, "aggregators": min(spec.aggregators, w)}
            for i, (w, m) in enumerate(sizes)
            if i and (w, m) != sizes[i - 1]
        ]
        options |= {"resize": {"schedule": changes}} if changes else {}
    else:
        limits = dataclasses.replace(limits, budget_usd=spec.budget_usd)
        job = dataclasses.replace(job, epochs=spec.epochs, limits=limits)
        options = policy.options(name)
    seen: list[Event] = []
    with other_home():
        configuration = configure(job, platform="simulated", sync="hsp", batch_size=spec.batch_size, **options)
        result = train(job, configuration, on_event=seen.append, loggers=[]).raise_if_failed()
    evaluated = sorted((e for e in seen if isinstance(e, Measured)), key=lambda e: e.epoch)
    starts = [e for e in seen if isinstance(e, GenerationStarted)]
    began = next(e for e in seen if isinstance(e, RunStarted))

    def functions(epoch: int) -> tuple[int, int]:
        now = max((s for s in starts if s.from_epoch <= epoch), key=lambda s: s.from_epoch, default=began)
        return now.workers, now.memory_mb

    return SimulatedRun(
        seconds=result.summary.seconds,
        cost_usd=result.summary.cost_usd,
        losses=tuple(float(e.metrics[spec.monitor] or 0.0) for e in evaluated),
        functions=tuple(functions(e.epoch - 1) for e in evaluated),
    )


def replayed(spec: EnvironmentSpec, sizes: Sequence[tuple[int, int]]) -> tuple[float, float, list[float]]:
    """Seconds, US dollars and losses of epochs with these functions in the environment, without scatter."""
    env = Environment(spec, noisy=False)
    seconds, usd, losses, before = 0.0, 0.0, [spec.curve.start], None
    for workers, memory_mb in sizes:
        now = env.chosen(workers, memory_mb)
        moved_s, moved_usd = (0.0, 0.0) if now is before else change(before, now, ahead=spec.ahead)
        seconds, usd = seconds + moved_s + now.seconds, usd + moved_usd + now.cost_usd
        losses.append(env.transitions.after(losses[-1], workers))
        before = now
    return seconds, usd, losses[1:]


def schedule_errors(job: Job, spec: EnvironmentSpec, sizes: Sequence[tuple[int, int]]) -> dict[str, object]:
    """A schedule in the environment and in the simulator: seconds, US dollars, last loss, and relative errors of the environment.

    Args:
        job, spec: see `simulated_run`.
        sizes: number and memory of the functions of each epoch.
    """
    run = simulated_run(job, spec, sizes=sizes)
    seconds, usd, losses = replayed(spec, sizes)
    return {
        "functions": [list(x) for x in sizes],
        "simulated_s": round(run.seconds, 3),
        "environment_s": round(seconds, 3),
        "simulated_usd": round(run.cost_usd, 8),
        "environment_usd": round(usd, 8),
        "simulated_losses": [round(x, 4) for x in run.losses],
        "environment_losses": [round(x, 4) for x in losses],
        "error_s": round(seconds / run.seconds - 1, 4),
        "error_usd": round(usd / run.cost_usd - 1, 4),
    }


def against_simulator(job: Job, spec: EnvironmentSpec, policy: SavedPolicy | None) -> dict[str, Any]:
    """Time, cost and loss of a run with changes, and of one by a policy, in the environment and in the simulator.

    Args:
        job: whose simulation has a compute model.
        spec: its environment.
        policy: of the job under some budget; None: the first comparison only.
    """
    sizes = [(w, MEMORY_MB) for w in CHANGES for _ in range(2)]
    said: dict[str, Any] = {"schedule": schedule_errors(job, spec, sizes)}
    if policy is None:
        return said
    described = policy.environment
    for name, choose in (("network", chooser(described, policy.network)), ("programme", asked(policy.table))):
        said[name] = _followed(job, spec, policy, name, outcome_of(described, choose))
    return said


def _followed(job: Job, spec: EnvironmentSpec, policy: SavedPolicy, name: str, chosen: Outcome) -> dict[str, Any]:
    """One simulated run by a schedule beside its mean in the environment."""
    try:
        run = simulated_run(job, policy.environment, policy=policy, name=name)
    except RunFailed as failed:
        return {"failed": str(failed).splitlines()[0]}
    return {
        "budget_usd": round(policy.environment.budget_usd, 5),
        "reached": run.losses[-1] <= spec.target_loss,
        "simulated_s": round(run.seconds, 2),
        "environment_s": round(chosen.seconds, 2),
        "simulated_usd": round(run.cost_usd, 6),
        "environment_usd": round(chosen.cost_usd, 6),
        "functions": [list(x) for x in run.functions],
        "losses": [round(x, 4) for x in run.losses],
        "same_functions_in_the_environment_s": round(replayed(spec, run.functions)[0], 2),
    }
