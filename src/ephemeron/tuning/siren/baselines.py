"""Schedules to compare a policy with, in the same environment: grid search and exact search of static configurations, and a dynamic
programme over epochs.

Static configurations are compared by their mean time over noisy runs, nearly all of which must reach the target within the budget. Dynamic
programmes are in `dynamic_programme` and `budget_programme`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ephemeron.errors import PlanInfeasible
from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, change
from ephemeron.tuning.siren.epoch_model import EpochCosts

SEEDS = tuple(range(1000, 1200))
"""Noisy runs by which schedules are compared."""
RELIABLE = 0.99
"""Share of the runs in which a schedule must reach the target within the budget to be used."""
HOPELESS = 1.5
"""Mean time without the scatter of losses, divided by the best time with it, above which a static configuration is not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Noisy runs of one schedule."""

    seconds: float
    """Mean duration of the runs that reached the target; infinite: none did."""
    cost_usd: float
    reached: float
    """Share of the runs that reached the target within the budget."""
    runs: tuple[float, ...] = ()
    """Durations."""

    def counted_s(self, again_s: float) -> float:
        """Mean duration of all runs; one that misses the target counts with another one after it.

        Args:
            again_s: mean duration of the other one.
        """
        return float(np.mean(self.runs)) + (1 - self.reached) * again_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlan:
    """A configuration that does not change."""

    workers: int
    memory_mb: int
    outcome: Outcome
    evaluated: int
    """Configurations that were compared."""


Chooser = Callable[[Environment], EpochCosts]
"""The choice for the next epoch, by the environment as it stands."""


def outcome_of(spec: EnvironmentSpec, choose: Chooser, seeds: Sequence[int] = SEEDS) -> Outcome:
    """Noisy runs of a schedule.

    Args:
        spec: of the environment.
        choose: the schedule.
        seeds: of the runs.
    """
    return _outcome(Environment(spec), choose, seeds)


def _outcome(env: Environment, choose: Chooser, seeds: Sequence[int]) -> Outcome:
    times, costs, reached = [], [], []
    for seed in seeds:
        env.reset(seed=seed)
        over, info = False, dict[str, Any]()
        while not over:
            _, _, over, _, info = env.advance(choose(env))
        reached.append(bool(info["reached"]))
        times.append(env.seconds)
        costs.append(env.spent_usd)
    good = [t for t, r in zip(times, reached, strict=True) if r]
    return Outcome(
        seconds=float(np.mean(good)) if good else math.inf,
        cost_usd=float(np.mean(costs)),
        reached=float(np.mean(reached)),
        runs=tuple(times),
    )


def static_seconds(env: Environment, costs: EpochCosts) -> tuple[float, float]:
    """Mean time and cost of a run with fixed functions, without the scatter of losses; infinite where it fails."""
    seconds, usd = change(None, costs, ahead=env.description.ahead)
    loss, slow = env.description.curve.start, float(env.mean_slowest[costs.workers])
    for _ in range(env.description.epochs):
        seconds, usd = seconds + costs.seconds * slow, usd + costs.cost_usd * slow
        loss = env.transitions.after(loss, costs.workers)
        if usd > env.description.budget_usd:
            break
        if loss <= env.description.target_loss:
            return seconds, usd
    return math.inf, usd


def _lowest(env: Environment, workers: int) -> float:
    """Lowest mean loss of a run of all epochs with fixed functions."""
    losses = [env.description.curve.start]
    for _ in range(env.description.epochs):
        losses.append(env.transitions.after(losses[-1], workers))
    return min(losses)


def _best(env: Environment, candidates: Collection[EpochCosts], seeds: Sequence[int]) -> StaticPlan | None:
    """The configuration with the least mean time over noisy runs, of those that reach the target in `RELIABLE` of them.

    Memory has no influence on losses, so of a number of functions the fastest memory size that is reliable is the best.
    """
    known = sorted(((s, e) for e in candidates if math.isfinite(s := static_seconds(env, e)[0])), key=lambda k: k[0])
    best: tuple[EpochCosts, Outcome] | None = None
    done = set[int]()
    for seconds, e in known:
        if best is not None and seconds > HOPELESS * best[1].seconds:
            break
        if e.workers in done:
            continue
        found = _outcome(env, lambda _, e=e: e, seeds)  # type: ignore[misc]
        if found.reached >= RELIABLE:
            done.add(e.workers)
            if best is None or found.seconds < best[1].seconds:
                best = e, found
    if best is None:
        return None
    return StaticPlan(workers=best[0].workers, memory_mb=best[0].memory_mb, outcome=best[1], evaluated=len(candidates))


def static_plan(spec: EnvironmentSpec, seeds: Sequence[int] = SEEDS) -> StaticPlan:
    """The best of all static configurations.

    Raises:
        PlanInfeasible: none reaches the target within the budget and the epochs.
    """
    env = Environment(spec)
    found = _best(env, env.table.values(), seeds)
    if found is None:
        lowest = min(_lowest(env, workers) for workers in env.workers)
        if lowest > spec.target_loss:
            raise PlanInfeasible(
                f"no number of functions reaches a loss of {spec.target_loss:g} in {spec.epochs} epochs: the lowest that is expected is "
                f"{lowest:.3g}",
                binding="epochs",
            )
        raise PlanInfeasible(
            f"no number of functions reaches a loss of {spec.target_loss:g} for ${spec.budget_usd:g} in {spec.epochs} epochs",
            binding="budget_usd",
        )
    return found


def grid_search(spec: EnvironmentSpec, seeds: Sequence[int] = SEEDS, *, memory_mb: int | None = None) -> StaticPlan | None:
    """The best static configuration of a grid: numbers of functions that are powers of two, each with every doubling of memory.

    Args:
        memory_mb: of all functions; None: searched, too.
    """
    env = Environment(spec)
    rows = [e for e in env.table.values() if e.workers & (e.workers - 1) == 0]
    sizes = sorted({e.memory_mb for e in rows})
    wanted = [sizes[0] * 2**i for i in range(20) if sizes[0] * 2**i <= sizes[-1]] if memory_mb is None else [memory_mb]
    grid = {min(sizes, key=lambda s, m=m: abs(s - m)) for m in wanted}  # type: ignore[misc]
    return _best(env, [e for e in rows if e.memory_mb in grid], seeds)
