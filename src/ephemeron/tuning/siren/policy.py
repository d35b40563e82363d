"""Saved policies: a document, and beside it the file of the library that trains them.

`NAME.json` holds the environment, the network as matrices, how it was trained, and how it compares with static configurations and the bound;
`NAME.zip` is Stable-Baselines3's, to go on training from.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ephemeron.config.typed import Count, NonNegative, Typed, build, plain
from ephemeron.errors import JobError
from ephemeron.training.task.learned_schedule import EpochState, LearnedPolicy, PolicyNetwork
from ephemeron.tuning.siren.environment import EnvironmentSpec, scales_of

VERSION = 2


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
class Comparison(Typed):
    """Mean seconds of noisy runs in the environment; `reached`: share of them that reached the target within the budget."""

    static_workers: Count
    static_memory_mb: Count
    static_s: NonNegative
    learned_s: NonNegative
    """0: none reached the target."""
    learned_reached: NonNegative
    programme_s: NonNegative
    """Of the dynamic programme's schedule; 0: as above."""
    programme_reached: NonNegative
    bound_s: NonNegative
    seeds: Count

    @property
    def learned_is_better(self) -> bool:
        """Whether the policy may be used: it reached the target whenever it was tried, and sooner than the best static configuration."""
        return self.learned_reached == 1 and 0 < self.learned_s < self.static_s

    def sentence(self) -> str:
        """One line for the user."""
        learned = f"{self.learned_s:.4g} s" if self.learned_s else "no success"
        static = f"{self.static_s:.4g} s with {self.static_workers} functions of {self.static_memory_mb} MB throughout"
        text = (
            f"learned schedule: {learned} predicted, against {static}; no schedule takes less than {self.bound_s:.4g} s"
        )
        if self.learned_is_better:
            return text
        why = (
            "is not faster"
            if self.learned_reached == 1
            else f"reached the target in {self.learned_reached:.0%} of {self.seeds} tries"
        )
        return f"{text}. It {why}, so the static configuration is used"


@dataclass(frozen=True, kw_only=True)
class SavedPolicy(Typed):
    """A policy for one job on one platform under one budget."""

    version: int = VERSION
    environment: EnvironmentSpec
    network: PolicyNetwork
    training: Training
    comparison: Comparison

    def exported(self) -> LearnedPolicy:
        """What a function needs to decide."""
        spec = self.environment
        model = spec.model()
        return LearnedPolicy(
            network=self.network, bounds=spec.bounds, scales=scales_of(spec, model.table), monitor=spec.monitor,
            budget_usd=spec.budget_usd, epochs=spec.epochs, memory_needed_mb=model.memory_needed_mb, aggregators=spec.aggregators,
        )  # fmt: skip

    def first(self) -> tuple[int, int]:
        """Number and memory of the first functions."""
        return self.exported().decide(EpochState(loss=self.environment.curve.start))

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
        raise JobError(
            f"policy {path} cannot be read: {e.strerror}", remedy="say --schedule learned, or name a saved policy"
        ) from None
    except ValueError:
        raise JobError(f"{path} is not a saved policy", remedy="name the .json file of a policy") from None
    if not isinstance(raw, dict) or "environment" not in raw or "network" not in raw:
        raise JobError(f"{path} is not a saved policy", remedy="name the .json file of a policy")
    if raw.get("version") != VERSION:
        raise JobError(f"policy {path} is of another release", remedy="train it again: --schedule learned")
    return build(SavedPolicy, raw, where=str(path))


def finite(seconds: float) -> float:
    """Seconds; 0 where there are none."""
    return seconds if math.isfinite(seconds) else 0.0
