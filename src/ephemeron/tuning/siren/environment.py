"""A run whose functions change between epochs, as a Gymnasium environment (SIREN, section 2.3 of the survey).

A step is an epoch. Its state holds loss, times to fetch data, compute and update, duration, use of memory and CPU, and the budget that is
left; its action is the number and memory of functions; its reward is −β times its duration, and ±C at the end: + if the loss reaches its
target within the budget, − otherwise. Durations and costs are those of the performance model, with noise and stragglers; losses are those
of a curve that was fitted to real gradients.

Functions for a change start while an epoch runs (`ahead`), as those of ephemeron's runs do. So an action is for the epoch after the next
one, later where starting takes longer than an epoch; the first action is for the first two epochs. In SIREN, functions of an epoch start
after the one before has ended: an action is for the next epoch, which takes the time of their start longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ephemeron.config.typed import AtLeast, Count, NonNegative, Positive, Typed
from ephemeron.errors import JobError
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.task.learned_schedule import LARGEST, STATE, ActionBounds, EpochState, StateScales
from ephemeron.tuning.siren.epoch_model import Correction, EpochCosts, EpochModel
from ephemeron.tuning.siren.loss_curve import LossCurve, Transitions

NOISE_DRAWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Typed):
    """Scatter of epochs."""

    spread: NonNegative = 0.03
    """Log-normal spread of the time of a function in an epoch; the slowest counts."""
    straggler_share: NonNegative = 0.002
    """Share of functions that are slow in an epoch."""
    straggler_factor: Annotated[float, AtLeast(1)] = 1.5
    """Time of a slow function divided by that of the others."""
    loss_spread: NonNegative = 0.02
    """Log-normal spread of the loss after an epoch, cut off at three times it."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec(Typed):
    """All that an environment depends on: a plain document, saved beside a policy."""

    job: str
    """Name of the job, and a digest of it."""
    profile: Profile
    curve: LossCurve
    target_loss: Positive
    budget_usd: Positive
    epochs: Count
    """Epochs after which a run has failed."""
    batch_size: Count
    aggregators: Count = 2
    bounds: ActionBounds
    monitor: str = "loss"
    seconds: Correction = field(default_factory=Correction)
    cost: Correction = field(default_factory=Correction)
    noise: Noise = field(default_factory=Noise)
    ahead: bool = True
    """Functions for a change start while the epoch before runs."""
    reference_s: Positive
    """Typical duration of a run: β is 1 divided by it."""
    bonus: NonNegative = 1.0
    """C."""

    def model(self) -> EpochModel:
        """Epochs of the job."""
        return EpochModel(
            self.profile, self.bounds, batch_size=self.batch_size, aggregators=self.aggregators, seconds=self.seconds, cost=self.cost
        )


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """An epoch as it happened."""

    workers: int
    memory_mb: int
    seconds: float
    cost_usd: float
    loss: float


class Environment(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):  # type: ignore[misc]
    """A run of a job under a budget.

    Args:
        spec: of the job, its platform and its limits.
        noisy: False: every epoch takes its mean time, and losses are those of the curve.

    Raises:
        JobError: no function holds a batch, or the loss is below its target before training.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, spec: EnvironmentSpec, *, noisy: bool = True) -> None:
        self.description, self.noisy = spec, noisy
        self.model = spec.model()
        self.table = self.model.table
        if not self.table:
            raise JobError(f"a batch needs {self.model.memory_needed_mb:.0f} MB, more than every memory size has")
        if spec.curve.start <= spec.target_loss:
            raise JobError(f"the loss is {spec.curve.start:.4g} before training, below the target {spec.target_loss:g}")
        b = spec.bounds
        self.workers = range(b.least_workers, b.most_workers + 1)
        self.transitions = Transitions(spec.curve, self.workers)
        self.scales = scales_of(spec, self.table)
        self.mean_slowest = mean_slowest(spec.noise, b.most_workers)
        self.observation_space = spaces.Box(-LARGEST, LARGEST, (len(STATE),), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.reset()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.loss, self.spent_usd, self.seconds = self.description.curve.start, 0.0, 0.0
        self.history: list[EpochRecord] = []
        self._now: EpochCosts | None = None
        self._next: EpochCosts | None = None
        self._waits_s = 0.0
        self.state = EpochState(loss=self.loss)
        return self._observation(), {}

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        costs = self.chosen(*self.description.bounds.configuration(np.asarray(action, dtype=float)))
        return self.advance(costs)

    def chosen(self, workers: int, memory_mb: int) -> EpochCosts:
        """The epoch of a choice; with more memory, where a batch does not fit."""
        found = self.table.get((workers, memory_mb))
        if found is not None:
            return found
        return min(
            (e for e in self.table.values() if e.workers == workers),
            key=lambda e: abs(e.memory_mb - memory_mb),
            default=min(self.table.values(), key=lambda e: (abs(e.workers - workers), abs(e.memory_mb - memory_mb))),
        )

    def advance(self, costs: EpochCosts) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """`step` for a choice of the table."""
        spec, noise = self.description, self.description.noise
        seconds, usd, now = self._changed(costs)
        slow = self._slow(now.workers)
        epoch_s = now.seconds * slow
        seconds, usd = seconds + epoch_s, usd + now.cost_usd * slow
        after = self.transitions.after(self.loss, now.workers)
        if self.noisy and noise.loss_spread:
            after *= float(np.exp(noise.loss_spread * np.clip(self.np_random.standard_normal(), -3.0, 3.0)))
        self.loss, self.spent_usd, self.seconds = after, self.spent_usd + usd, self.seconds + seconds
        self._waits_s -= seconds
        self.history.append(EpochRecord(now.workers, now.memory_mb, seconds, usd, self.loss))
        then = self.pending() or now  # an epoch's decision is made by the functions of the next one
        self.state = EpochState(
            loss=self.loss,
            fetch_s=now.fetch_s,
            compute_s=now.compute_s,
            update_s=now.update_s,
            epoch_s=epoch_s,
            memory_use=self.model.memory_needed_mb / then.memory_mb,
            cpu_use=min(1.0, now.compute_s / epoch_s),
            budget_left=1 - self.spent_usd / spec.budget_usd,
            workers=then.workers,
            memory_mb=then.memory_mb,
            epochs_left=1 - len(self.history) / spec.epochs,
        )
        within = self.spent_usd <= spec.budget_usd
        reached = self.loss <= spec.target_loss and within
        failed = not within or len(self.history) >= spec.epochs
        reward = -seconds / spec.reference_s
        if reached:
            reward += spec.bonus
        elif failed:
            reward -= spec.bonus
        info = {"reached": reached, "seconds": self.seconds, "cost_usd": self.spent_usd, "epochs": len(self.history)}
        return self._observation(), reward, reached or failed, False, info

    def pending(self) -> EpochCosts | None:
        """Functions of the next epoch as far as no action changes them any more; those of the last one, where an action still can;
        None: the run has not begun."""
        if self._now is None or not self.description.ahead:
            return self._now
        return self._next if self._next is not None and self._waits_s <= 0 else self._now

    def _changed(self, costs: EpochCosts) -> tuple[float, float, EpochCosts]:
        """Seconds and cost of a change before the epoch, and the functions of the epoch.

        Args:
            costs: what the action chooses.
        """
        before = self._now
        if before is None or not self.description.ahead:
            now = costs
        else:
            now = before
            if self._next is not None and self._waits_s <= 0:
                now, self._next = self._next, None
            if self._next is None and costs is not now:
                self._next, self._waits_s = costs, costs.cold_s + 2 * costs.begin_s
        self._now = now
        if now is before:
            return 0.0, 0.0, now
        return *change(before, now, ahead=self.description.ahead), now

    def _slow(self, workers: int) -> float:
        """Time of the slowest function, divided by the usual time."""
        if not self.noisy:
            return float(self.mean_slowest[workers])
        noise = self.description.noise
        each = np.exp(noise.spread * self.np_random.standard_normal(workers))
        each[self.np_random.random(workers) < noise.straggler_share] *= noise.straggler_factor
        return float(each.max())

    def _observation(self) -> NDArray[np.float32]:
        return self.scales.observation(self.state).astype(np.float32)


def change(before: EpochCosts | None, now: EpochCosts, *, ahead: bool) -> tuple[float, float]:
    """Seconds and US dollars of a change of functions.

    Args:
        before: those until then; None: the run begins.
        now: those from then on.
        ahead: new functions start while the epoch before runs.
    """
    kept = before.workers if before is not None and before.memory_mb == now.memory_mb else 0
    new = max(0, now.workers - kept)
    starts = before is None or (new > 0 and not ahead)
    seconds = now.begin_s + (now.cold_s if starts else 0.0)
    usd = now.gb_s_usd * now.workers * seconds
    if before is not None and ahead:
        usd += now.gb_s_usd * new * (now.cold_s + now.begin_s)
    return seconds, usd


def mean_slowest(noise: Noise, most_workers: int) -> NDArray[np.float64]:
    """Mean time of the slowest of so many functions, divided by the usual time, for 0 to `most_workers` functions."""
    random = np.random.default_rng(0)
    each = np.exp(noise.spread * random.standard_normal((NOISE_DRAWS, most_workers)))
    each[random.random(each.shape) < noise.straggler_share] *= noise.straggler_factor
    means = np.maximum.accumulate(each, axis=1).mean(axis=0)
    return np.concatenate([[1.0], means])


def scales_of(spec: EnvironmentSpec, table: dict[tuple[int, int], EpochCosts]) -> StateScales:
    """What states are divided by: the geometric mean of the epochs of all choices."""
    typical = float(np.exp(np.mean(np.log([e.seconds for e in table.values()]))))
    return StateScales(start_loss=spec.curve.start, target_loss=spec.target_loss, epoch_s=typical, bounds=spec.bounds)
