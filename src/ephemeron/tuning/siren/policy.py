"""Saved policies: a document, and beside it the file of the library that trains them.

`NAME.json` holds the environment, the network as matrices, the dynamic programme's schedule as a table and as a list, how the network was
trained, and how all of them compare with the static configuration and the bounds;
`NAME.zip` is Stable-Baselines3's, to go on training from.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ephemeron.config.typed import Count, NonNegative, Typed, build, plain
from ephemeron.errors import JobError
from ephemeron.training.job import Target
from ephemeron.training.task.decision_table import DecisionTable
from ephemeron.training.task.learned_schedule import EpochState, LearnedPolicy, LearnedSchedule, PolicyNetwork
from ephemeron.tuning.siren.baselines import RELIABLE
from ephemeron.tuning.siren.environment import EnvironmentSpec, scales_of

VERSION = 3
SCHEDULE = f"{LearnedSchedule.__module__}:{LearnedSchedule.__qualname__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Typed):
    """How a policy was trained."""

    seed: int
    steps: int
    """Epochs of the environment in which PPO has trained."""
    imitated: int
    """Epochs whose choice by the dynamic programme it imitated first."""
    seconds: NonNegative
    """Time of this machine that it took."""
    rewards: tuple[float, ...] = ()
    """Mean total reward of evaluations during the training."""
    measured_runs: int = 0
    """Real runs by which the environment was corrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Typed):
    """Noisy runs of a schedule in the environment."""

    name: Literal["static", "network", "programme", "list"]
    seconds: NonNegative
    """Mean duration; a run that misses the target counts with another one by the static configuration after it."""
    reached: NonNegative
    """Share of the runs that reached the target within the budget."""

    @property
    def words(self) -> str:
        """What it is."""
        return {
            "static": "the static configuration",
            "network": "the learned policy",
            "programme": "the dynamic programme's schedule",
            "list": "a fixed list of changes",
        }[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Typed):
    """Schedules in the same noisy runs of the environment."""

    static_workers: Count
    static_memory_mb: Count
    candidates: tuple[Candidate, ...]
    """The static configuration first."""
    bound_s: NonNegative
    """Lower bound of the mean time with a budget that is kept in the mean."""
    least_s: NonNegative
    """Near-exact lower bound for schedules that are reliable."""
    seeds: Count

    def of(self, name: str) -> Candidate:
        """A schedule by its name."""
        return next(c for c in self.candidates if c.name == name)

    @property
    def used(self) -> Candidate:
        """The fastest of the schedules that reached the target in `RELIABLE` of the runs; the static configuration, if there is no other."""
        static = self.candidates[0]
        good = [c for c in self.candidates[1:] if c.reached >= RELIABLE and c.seconds < static.seconds]
        return min([static, *good], key=lambda c: c.seconds)

    def sentence(self) -> str:
        """One line for the user."""
        static, used = self.candidates[0], self.used
        said = f"{static.seconds:.4g} s with {self.static_workers} functions of {self.static_memory_mb} MB throughout"
        others = [f"{c.words} {_said(c, self.seeds)}" for c in self.candidates[1:]]
        text = f"predicted: {said}; {'; '.join(others)}; no schedule takes less than {self.least_s:.4g} s"
        if used is not static:
            return f"{text}. Used is {used.words}"
        unsure = all(c.reached < RELIABLE for c in self.candidates[1:])
        why = "reaches the target often enough" if unsure else "is faster and reaches the target often enough"
        return f"{text}. None of the others {why}, so the static configuration is used"


def _said(candidate: Candidate, seeds: int) -> str:
    if candidate.reached >= RELIABLE:
        return f"{candidate.seconds:.4g} s"
    return f"{candidate.seconds:.4g} s, with the target reached in {candidate.reached:.0%} of {seeds} tries"


@dataclass(frozen=True, kw_only=True)
class SavedPolicy(Typed):
    """Schedules for one job on one platform under one budget."""

    version: int = VERSION
    environment: EnvironmentSpec
    network: PolicyNetwork
    table: DecisionTable
    """Of the dynamic programme."""
    fixed: tuple[tuple[Count, Count], ...]
    """Number and memory of functions of each epoch, as a list."""
    training: Training
    comparison: Comparison

    def exported(self, name: str = "network") -> LearnedPolicy:
        """What a function needs to decide.

        Args:
            name: by the network, or by the dynamic programme's table (`programme`).
        """
        spec = self.environment
        model = spec.model()
        by_table = name == "programme"
        return LearnedPolicy(
            network=None if by_table else self.network,
            table=self.table if by_table else None,
            bounds=spec.bounds,
            scales=scales_of(spec, model.table),
            monitor=spec.monitor,
            budget_usd=spec.budget_usd,
            epochs=spec.epochs,
            memory_needed_mb=model.memory_needed_mb,
            aggregators=spec.aggregators,
        )

    def options(self, name: str) -> dict[str, Any]:
        """Options of a run by a schedule: its first functions, and how they change.

        Args:
            name: of the schedule.
        """
        if name in ("static", "list"):
            static = ((self.comparison.static_workers, self.comparison.static_memory_mb),)
            first, *others = self.fixed if name == "list" else static
            changes = [
                self._sizes(size) | {"from_epoch": i}
                for i, (before, size) in enumerate(itertools.pairwise((first, *others)), 1)
                if size != before
            ]
            return self._sizes(first) | ({"resize": {"schedule": changes}} if changes else {})
        policy = self.exported(name)
        first = policy.decide(EpochState(loss=self.environment.curve.start))
        return self._sizes(first) | {"resize": {"policy": Target(target=SCHEDULE, options={"policy": plain(policy)})}}

    def _sizes(self, size: tuple[int, int]) -> dict[str, Any]:
        return {"workers": size[0], "memory_mb": size[1], "aggregators": min(self.environment.aggregators, size[0])}

    def save(self, path: Path) -> None:
        """Writes the document."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain(self), indent=1) + "\n")


def load_policy(path: Path) -> SavedPolicy:
    """A saved policy.

    Raises:
        JobError: the file is absent, or not a policy of this release.
    """
    try:
        raw = json.loads(path.read_text())
    except OSError as e:
        raise JobError(f"policy {path} cannot be read: {e.strerror}", remedy="say --schedule learned, or name a saved policy") from None
    except ValueError:
        raise JobError(f"{path} is not a saved policy", remedy="name the .json file of a policy") from None
    if not isinstance(raw, dict) or "environment" not in raw or "network" not in raw:
        raise JobError(f"{path} is not a saved policy", remedy="name the .json file of a policy")
    if raw.get("version") != VERSION:
        raise JobError(f"policy {path} is of another release", remedy="train it again: --schedule learned")
    found = build(SavedPolicy, raw, where=str(path))
    _ = found.table.table  # refused here if it is damaged
    return found
