"""The environment of a learned schedule beside the simulator: the same policy in both, with real gradients in the second."""

from __future__ import annotations

from typing import Any

from ephemeron.errors import RunFailed
from ephemeron.training.job import Job
from ephemeron.tuning.siren.baselines import Outcome, outcome_of
from ephemeron.tuning.siren.environment import EnvironmentSpec
from ephemeron.tuning.siren.learning import chooser
from ephemeron.tuning.siren.oracle import replayed, schedule_errors, simulated_run
from ephemeron.tuning.siren.policy import SavedPolicy
from ephemeron.tuning.siren.schedules import asked

CHANGES = (1, 6, 3, 8)
"""Functions of a run with a fixed schedule, by two epochs each."""
MEMORY_MB = 1792


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
