"""Policies of synchronisation between regions, by the names that users give them.

    asgd        steps of every iteration are sent and added as they arrive: the paper's baseline
    asgd-ga     the same for the steps of H iterations
    ama         parameters every H iterations, averaged as they arrive
    sma         parameters every H iterations, averaged by all at once
    diloco      changes of H iterations, applied by an outer optimiser, by all at once; in fragments with a delay
    auto        diloco whose H, compression, fragments and delay follow the measured link

Options follow the name: `diloco:fragments=4,delay=5,lr=0.7`, `diloco:auto,limit=100`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from ephemeron.config.typed import Count, NonNegative, Positive, Typed, Within, build
from ephemeron.errors import JobError
from ephemeron.regions.compression import codec_of
from ephemeron.regions.policies.base import (
    AccumulatedGradients,
    Arrays,
    AsynchronousAverage,
    Contribution,
    DiLoCo,
    RegionPolicy,
    SynchronousAverage,
    weighted_mean,
)
from ephemeron.regions.policies.schedule import (
    Adaptation,
    AdaptiveSchedule,
    Due,
    ExchangeSchedule,
    Measured,
    RoundPlan,
    adapted,
    first_plans,
    next_plan,
    slowest,
)

__all__ = [
    "Adaptation",
    "AdaptiveSchedule",
    "Arrays",
    "Contribution",
    "Due",
    "ExchangeSchedule",
    "Measured",
    "RegionPolicy",
    "RegionSync",
    "RoundPlan",
    "adapted",
    "checked_sync",
    "first_plans",
    "next_plan",
    "parse_sync",
    "slowest",
    "weighted_mean",
]

PolicyName = Literal["asgd", "asgd-ga", "ama", "sma", "diloco"]
_OF_DILOCO = ("lr", "momentum", "fragments", "delay", "mixing")
_OF_ADAPTIVE = ("lr", "momentum", "mixing", "limit")
_OF_ASYNCHRONOUS = ("staleness",)
_WHOLE = ("fragments", "delay", "staleness", "limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSync(Typed):
    """A policy and its options."""

    policy: PolicyName = "sma"
    lr: Positive = 0.7
    """Outer learning rate (DiLoCo, table 5 of the paper)."""
    momentum: Annotated[float, Within(0, 1, open_maximum=True)] = 0.3
    """Outer Nesterov momentum. DiLoCo publishes 0.9, for hundreds of local steps of AdamW; see decision 0037."""
    fragments: Count = 1
    """Parts of the parameters that are exchanged at different iterations."""
    delay: Annotated[int, Within(0, 1_000_000)] = 0
    """Iterations between sending a fragment and applying it; below H."""
    mixing: NonNegative | None = None
    """Part of its own parameters that a region keeps where it applies a round; None: by delay and H, see `diloco.mixing_for`."""
    staleness: Count = 4
    """Rounds that a region may be ahead of what it has applied from any other one, under asynchronous policies."""
    auto: bool = False
    """Whether H, compression, fragments and delay follow the measured link."""
    limit: Count = 64
    """With `auto`: H and delay together are at most this, iterations."""

    @property
    def synchronous(self) -> bool:
        """Whether all regions apply the same rounds before the same iterations."""
        return self.policy in ("sma", "diloco")

    def new(self) -> RegionPolicy:
        """The policy in its first state."""
        if self.policy == "diloco":
            return DiLoCo(lr=self.lr, momentum=self.momentum, mixing=self.mixing)
        if self.policy == "sma":
            return SynchronousAverage()
        return AsynchronousAverage() if self.policy == "ama" else AccumulatedGradients()

    def every(self, given: int) -> int:
        """H, where the user has given one."""
        return 1 if self.policy == "asgd" else given


def parse_sync(text: str) -> RegionSync:
    """A policy from `NAME` or `NAME:option=value,…`.

    Raises:
        JobError: unknown, or an option that is not for it.
    """
    name, _, rest = text.partition(":")
    if name not in (*get_args(PolicyName), "auto"):
        raise JobError(f"regions.sync = {text!r} is no policy", remedy=f"use one of {', '.join((*get_args(PolicyName), 'auto'))}")
    options = [option for option in rest.split(",") if option]
    auto = name == "auto" or (name == "diloco" and "auto" in options)
    name = "diloco" if auto else name
    values: dict[str, object] = {"policy": name, "auto": auto}
    allowed = _allowed_options(name, auto=auto)
    for option in options:
        if auto and option == "auto":
            continue
        key, equals, value = option.partition("=")
        if not equals or key not in allowed:
            raise JobError(
                f"regions.sync = {text!r}: {key!r} is no option of {name}",
                remedy=f"use {', '.join(f'{each}=VALUE' for each in allowed)}" if allowed else "leave it out",
            )
        try:
            values[key] = int(value) if key in _WHOLE else float(value)
        except ValueError:
            raise JobError(f"regions.sync = {text!r}: {value!r} is no number", remedy=f"write {key}=NUMBER") from None
    found = build(RegionSync, values, where="regions.sync")
    if found.mixing is not None and found.mixing >= 1:
        raise JobError(f"regions.sync = {text!r}: mixing keeps the common parameters out", remedy="use a mixing below 1")
    return found


def checked_sync(text: str, compression: str, every: int) -> RegionSync:
    """A policy as `parse_sync` returns it.

    Args:
        text: value of `regions.sync`.
        compression: value of `regions.compression`.
        every: the smallest H of all regions.

    Raises:
        JobError: these do not go together.
    """
    sync, codec = parse_sync(text), codec_of(compression)
    if codec.lossy and sync.new().averages:
        raise JobError(
            f"regions.compression = {compression!r} is not for {sync.policy}, which sends parameters, not changes",
            remedy="use regions.sync = 'diloco', or leave the compression out",
        )
    if sync.delay >= sync.every(every):
        raise JobError(
            f"regions.sync = {text!r}: a delay of {sync.delay} is not below {every} iterations between exchanges",
            remedy="use a smaller delay, or a larger exchange_every",
        )
    return sync


def _allowed_options(name: str, *, auto: bool) -> tuple[str, ...]:
    if name == "diloco":
        return _OF_ADAPTIVE if auto else _OF_DILOCO
    return () if name == "sma" else _OF_ASYNCHRONOUS
