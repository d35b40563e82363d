"""How many executors to start: out fast, in slowly, within the platform's concurrency and burst. Pure.

NumPyWren (survey 2.4) keeps executors in proportion to the tasks in the queue, and lets them end when they find nothing. So does this
policy: the target follows the demand up at once, and down by half every `hold_s`. No executor is ended: one that finds no task
for its `idle_s` ends by itself, and one whose lifetime ends is replaced only up to the target. What is started but has not announced
itself counts as there for `start_s`, or a cold start would be answered with more starts.

Starts are limited by a token bucket: `burst` at once, `starts_per_s` after that. A refused start empties it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from ephemeron.config.typed import Count, MoreThan, NonNegative, Positive, Typed, Within
from ephemeron.errors import JobError
from ephemeron.functions.base import Limits
from ephemeron.functions.tasks.model import QueueDepth


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingLimits(Typed):
    """Bounds and time constants of the policy."""

    most: Count
    """Executors, at most."""
    least: Annotated[int, Within(0, 1e9)] = 0
    """Executors while the queue is open."""
    tasks_per_executor: Positive = 1.0
    """Tasks in the queue for which one more executor is worth its start."""
    hold_s: NonNegative = 60.0
    """Seconds of lower demand before the target shrinks."""
    shrink: Annotated[float, Within(0, 1)] = 0.5
    """What is left of the target then."""
    burst: Count = 1000
    """Starts at once."""
    starts_per_s: Annotated[float, MoreThan(0)] = 100.0
    """Further starts."""
    start_s: Positive = 30.0
    """Seconds after which a start that has not announced itself is counted as failed."""

    def __post_init__(self) -> None:
        super(ScalingLimits, self).__post_init__()
        if self.least > self.most:
            raise JobError(f"least = {self.least} and most = {self.most} executors are not a range")


BURSTS: Mapping[str, tuple[int, float]] = {
    "aws": (1000, 100.0),
    "local": (8, 4.0),
    "openfaas": (20, 10.0),
    "ray": (64, 32.0),
    "lithops": (100, 50.0),
}
"""Starts at once, and per second after that. AWS Lambda: 1,000 environments per function every 10 s (its documentation). The others are our
own caution: a start costs their machines CPU time."""


def platform_scaling(platform: str, limits: Limits, **more: float) -> ScalingLimits:
    """Limits of a platform.

    Args:
        platform: its name.
        limits: its own; one of its places is left to the provisioner.
        more: further fields of `ScalingLimits`; `most` is at most what the platform allows.
    """
    burst, per_s = BURSTS.get(platform, (1000, 100.0))
    most = min(int(more.pop("most", limits.concurrency)), max(1, limits.concurrency - 1))
    fields: dict[str, float] = {"burst": burst, "starts_per_s": per_s, **more}
    return ScalingLimits(most=most, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """Memory of the policy: plain numbers, so that a provisioner hands it to its successor. Times are the caller's."""

    target: int = 0
    lower_since: float | None = None
    """Since when the demand has been below the target."""
    tokens: float | None = None
    """Starts that are free now; None: as many as the burst."""
    tokens_at: float = 0.0
    next_number: int = 1
    """Of the next executor."""
    starting: Mapping[int, float] = field(default_factory=dict)
    """Executors that were started and have not announced themselves, and when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """What to do now."""

    start: tuple[int, ...]
    """Numbers of the executors to start."""
    state: ScalingState


def decide(limits: ScalingLimits, state: ScalingState, depth: QueueDepth, *, now: float) -> ScalingDecision:
    """The policy.

    Args:
        limits: of the platform and the user.
        state: from the previous decision.
        depth: of the queue; names of executors begin with their number and a dash.
        now: seconds; never less than before.
    """
    there = {number for number in map(number_of, depth.executors) if number is not None}
    starting = {number: since for number, since in state.starting.items() if number not in there and now - since < limits.start_s}
    demand = math.ceil(depth.tasks / limits.tasks_per_executor)
    floor = 0 if depth.closed and not depth.tasks else limits.least
    demand = min(max(demand, floor), limits.most)
    target, lower_since = _target(limits, state, demand, now)
    before = float(limits.burst) if state.tokens is None else state.tokens
    tokens = min(float(limits.burst), before + (now - state.tokens_at) * limits.starts_per_s)
    wanted = target if depth.tasks else floor
    n = max(0, min(wanted - len(depth.executors) - len(starting), math.floor(tokens)))
    numbers = tuple(range(state.next_number, state.next_number + n))
    return ScalingDecision(
        start=numbers,
        state=ScalingState(
            target=target,
            lower_since=lower_since,
            tokens=tokens - n,
            tokens_at=now,
            next_number=state.next_number + n,
            starting={**starting, **dict.fromkeys(numbers, now)},
        ),
    )


def refused(state: ScalingState, numbers: tuple[int, ...]) -> ScalingState:
    """The state after the platform has refused to start these executors."""
    starting = {number: since for number, since in state.starting.items() if number not in numbers}
    return replace(state, starting=starting, tokens=0.0)


def number_of(executor: str) -> int | None:
    """Number in the name of an executor; None: it was not started by a provisioner."""
    head = executor.partition("-")[0]
    return int(head) if head.isdigit() else None


def _target(limits: ScalingLimits, state: ScalingState, demand: int, now: float) -> tuple[int, float | None]:
    if demand >= state.target:
        return demand, None
    since = now if state.lower_since is None else state.lower_since
    if now - since < limits.hold_s:
        return state.target, since
    return max(demand, math.floor(state.target * limits.shrink)), now
