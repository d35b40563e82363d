"""Decisions of a learned policy on the functions of a run, after each epoch (SIREN, section 2.3 of the survey).

A policy is a small network, or a table (`decision_table`), that is given the state of an epoch and says how many functions with how much memory
a later one has. It is made elsewhere (`ephemeron.tuning.siren`); here it is a few matrices, so that a function needs NumPy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import Count, NonNegative, Positive, Typed, build
from ephemeron.training.job.generation import Resize
from ephemeron.training.task.decision_table import DecisionTable
from ephemeron.training.task.schedule import EpochMeasurements, Schedule

Vector: TypeAlias = NDArray[np.float64]

STATE = ("loss", "fetch_s", "compute_s", "update_s", "epoch_s", "memory_use", "cpu_use", "budget_left", "workers", "memory", "epochs_left")
"""Values of an observation, in this order."""
LARGEST = 10.0
"""Observations are cut off at plus and minus this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """State of a run after an epoch."""

    loss: float
    fetch_s: float = 0.0
    """Seconds of an epoch in which a function loads data and parameters."""
    compute_s: float = 0.0
    update_s: float = 0.0
    """Seconds in which it sends its contributions and merges those of others."""
    epoch_s: float = 0.0
    memory_use: float = 0.0
    """Memory that a function needs, divided by its quota."""
    cpu_use: float = 0.0
    """Computing time divided by the time of the epoch."""
    budget_left: float = 1.0
    """Share of the budget that is left."""
    workers: int = 0
    """Functions of the next epoch, as far as they are known; 0: the run has not begun."""
    memory_mb: int = 0
    epochs_left: float = 1.0
    """Share of the epochs that are left."""


@dataclass(frozen=True, kw_only=True)
class ActionBounds(Typed):
    """Numbers of functions and memory sizes that a policy may choose. An action is two numbers in [-1, 1], on logarithmic scales."""

    least_workers: Count = 1
    most_workers: Count
    quotas_mb: tuple[Count, ...]
    """Memory sizes, ascending."""
    total_memory_mb: NonNegative = 0.0
    """Largest sum of the memory of all functions; 0: there is none."""

    @cached_property
    def _logs(self) -> Vector:
        return np.asarray(np.log(np.asarray(self.quotas_mb, dtype=float)))

    def configuration(self, action: Vector) -> tuple[int, int]:
        """Number of functions and memory of an action, rounded to what there is."""
        first, second = (float(np.clip(x, -1.0, 1.0)) / 2 + 0.5 for x in action)
        ratio = self.most_workers / self.least_workers
        workers = round(self.least_workers * ratio**first)
        wanted = self._logs[0] + second * (self._logs[-1] - self._logs[0])
        return self.within(workers, self.quotas_mb[int(np.argmin(np.abs(self._logs - wanted)))])

    def within(self, workers: int, memory_mb: int) -> tuple[int, int]:
        """The nearest choice that keeps `total_memory_mb`: less memory, then fewer functions."""
        total = self.total_memory_mb
        if not total or workers * memory_mb <= total:
            return workers, memory_mb
        fitting = [q for q in self.quotas_mb if workers * q <= total]
        if fitting:
            return workers, fitting[-1]
        return max(self.least_workers, int(total // self.quotas_mb[0])), self.quotas_mb[0]

    def action(self, workers: int, memory_mb: int) -> Vector:
        """The action of a number of functions and a memory size: the inverse of `configuration`."""
        first = math.log(workers / self.least_workers) / (math.log(self.most_workers / self.least_workers) or 1.0)
        second = (math.log(memory_mb) - self._logs[0]) / ((self._logs[-1] - self._logs[0]) or 1.0)
        return np.array([2 * first - 1, 2 * second - 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateScales(Typed):
    """What a state is divided by."""

    start_loss: Positive
    """Loss before training."""
    target_loss: Positive
    """Loss at which the run ends."""
    epoch_s: Positive
    """Typical seconds of an epoch."""
    bounds: ActionBounds
    """Functions are told by the action that chooses them."""

    def observation(self, state: EpochState) -> Vector:
        """The state as a vector of values near [-1, 1], in the order of `STATE`: the loss on a logarithmic scale, 1 at the start and 0 at the target."""
        span = math.log(self.start_loss / self.target_loss) or 1.0
        loss = math.log(max(state.loss, 1e-9) / self.target_loss) / span if math.isfinite(state.loss) else LARGEST
        times = (x / self.epoch_s for x in (state.fetch_s, state.compute_s, state.update_s, state.epoch_s))
        functions = self.bounds.action(state.workers, state.memory_mb) if state.workers else (0.0, 0.0)
        found = np.array([loss, *times, state.memory_use, state.cpu_use, state.budget_left, *functions, state.epochs_left])
        return np.asarray(np.clip(np.nan_to_num(found, nan=0.0), -LARGEST, LARGEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Typed):
    """A dense layer: outputs are `weights @ inputs + bias`."""

    weights: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PolicyNetwork(Typed):
    """Mean of a Gaussian policy: dense layers with tanh between them."""

    layers: tuple[Layer, ...]

    @cached_property
    def _matrices(self) -> list[tuple[Vector, Vector]]:
        return [(np.asarray(layer.weights), np.asarray(layer.bias)) for layer in self.layers]

    def act(self, observation: Vector) -> Vector:
        """The action for an observation."""
        x = observation
        for i, (weights, bias) in enumerate(self._matrices):
            x = weights @ x + bias
            if i < len(self._matrices) - 1:
                x = np.tanh(x)
        return np.clip(x, -1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPolicy(Typed):
    """What a function needs to decide: a network or a table."""

    network: PolicyNetwork | None = None
    table: DecisionTable | None = None
    bounds: ActionBounds
    scales: StateScales
    monitor: str = "loss"
    """Metric whose target ends the run."""
    budget_usd: Positive
    epochs: Count
    """Of the whole run, at most."""
    memory_needed_mb: NonNegative = 0.0
    """Memory that a function needs."""
    aggregators: Count = 2
    """K, as far as there are as many functions."""

    def decide(self, state: EpochState) -> tuple[int, int]:
        """Number of functions and memory for a state."""
        if self.table is not None:
            return self.table.choose(state.loss, state.budget_left, state.workers, state.memory_mb)
        assert self.network is not None
        return self.bounds.configuration(self.network.act(self.scales.observation(state)))


class LearnedSchedule(Schedule):
    """Asks for the functions that a policy chooses.

    Args:
        policy: a `LearnedPolicy` as plain values.
    """

    def __init__(self, policy: Mapping[str, Any]) -> None:
        self._policy = build(LearnedPolicy, policy, where="learned schedule")

    def decide(self, measured: EpochMeasurements) -> Resize | None:
        policy = self._policy
        loss = measured.metrics.get(policy.monitor)
        state = EpochState(
            loss=measured.loss if loss is None else loss,
            fetch_s=measured.fetch_s,
            compute_s=measured.compute_s,
            update_s=measured.update_s,
            epoch_s=measured.epoch_s,
            memory_use=policy.memory_needed_mb / measured.memory_mb,
            cpu_use=measured.compute_s / measured.epoch_s if measured.epoch_s else 0.0,
            budget_left=1 - measured.spent_usd / policy.budget_usd,
            workers=measured.workers,
            memory_mb=measured.memory_mb,
            epochs_left=1 - measured.epoch / policy.epochs,
        )
        workers, memory_mb = policy.decide(state)
        if (workers, memory_mb) == (measured.workers, measured.memory_mb):
            return None
        return Resize(workers=workers, memory_mb=memory_mb, aggregators=min(policy.aggregators, workers))
