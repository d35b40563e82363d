"""A plan: the chosen configuration, its predicted time and cost, the reasons, and the alternatives. Saved as `plan.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from ephemeron.config import typed
from ephemeron.config.typed import Count, Positive
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """Deadline, budget and largest global batch that the user accepts. None: no limit."""

    deadline_s: Positive | None = None
    budget_usd: Positive | None = None
    max_global_batch: Count | None = None

    @property
    def seconds(self) -> float:
        return math.inf if self.deadline_s is None else self.deadline_s

    @property
    def usd(self) -> float:
        return math.inf if self.budget_usd is None else self.budget_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Predicted time, cost and requests of one configuration."""

    seconds: float
    """Seconds from launch to end, cold start included."""
    cost_usd: float
    memory_mb: float
    """Least quota that fits, the larger batch counting."""
    iterations: int
    phases_s: Mapping[str, float]
    """Seconds of the run on the critical path, by phase: start, load, compute, upload, aggregate, download, relay."""
    cost: Mapping[str, float]
    """`functions` (GB-seconds), `storage` (bytes and servers), `requests` (invocations, puts, gets, polls)."""
    invocations: int = 0
    puts: int = 0
    gets: int = 0
    polls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One configuration and its prediction."""

    workers: int
    memory_mb: int
    aggregators: int
    batch_size_aggregator: int
    batch_size_nonaggregator: int
    pattern: str
    sync: str
    channel: str
    compression: str
    local_steps: int = 1
    """Batches of a function between two exchanges, as the plan was asked for; said of the choice only."""
    predicted: Predicted

    @property
    def configuration(self) -> tuple[int | str, ...]:
        """Everything but the prediction, in the order of the fields."""
        return tuple(getattr(self, f.name) for f in fields(Choice) if f.name not in ("predicted", "local_steps"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative(Choice):
    """A configuration shown beside the chosen one."""

    why: str = ""
    """`chosen`, `cheapest`, `fastest`, `knee`, `one function`; or the step from the chosen one: `+1 worker`."""
    within_limits: bool = True
    time_ratio: float = 1.0
    """Ratio to the chosen one's time; `cost_ratio` is that to its cost."""
    cost_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineEstimate:
    """Estimate of the job as one process on a virtual machine or container: `vm_baseline`."""

    name: str
    seconds: float
    """Seconds from the request to the end."""
    cost_usd: float
    fits: bool = True
    """Whether a process with this batch fits the memory, by FasDL equation 4-1."""
    vcpus: float = 0.0
    counted_vcpus: float = 0.0
    """Those that were measured to help."""
    kind: str = "on demand"
    """`on demand`, `spot` or `fargate`."""
    arm64: bool = False
    verified: bool = True
    """Whether the price was checked; `as_of` is its ISO date."""
    as_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEstimate:
    """Speed from which a machine with a GPU costs less than the plan."""

    name: str
    hour_usd: float
    break_even: float | None
    """Times as fast as one vCPU of the functions; None: no speed is enough, since boot, download and the first minute cost
    more already."""
    seconds: float | None
    """None, as `cost_usd`: the price file does not say how fast it is."""
    cost_usd: float | None
    verified: bool
    as_of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncertainty:
    """Effect of the profile's intervals on time, cost and choice: `uncertainty.resampled`."""

    sources: Mapping[str, float | None]
    """Relative half widths of 95 % intervals, by source; None: not known."""
    draws: int
    time_s: tuple[float, float]
    """90 % interval of the chosen configuration; `cost_usd` is that of its cost."""
    cost_usd: tuple[float, float]
    keeps_limits: float
    """Share of the draws in which the limits hold."""
    same_choice: float
    """Share of the draws in which the choice stays the same."""
    instead: str | None
    """The most frequent other choice."""
    sensitive_to: str | None
    """The source that alone changes the choice most often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """Profile and prices that a plan rests on."""

    workload: str = ""
    platform: str = ""
    source: str = ""
    as_of: str = ""
    """ISO date of the prices."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """Method of the search, and what it proves."""

    method: str
    """`exact`, `two-stage` or `brute-force`."""
    seconds: float
    """Time of the whole plan: choice, front, alternatives and reasons."""
    evaluated: int
    """Candidates whose time and cost were computed."""
    pruned: int = 0
    """Candidates that a bound proved worse, or infeasible, without computing them."""
    optimal: bool
    gap: float | None
    """Relative distance that is left to the proven optimum; None: nothing is proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HapEpochs:
    """Epochs after which HAP is expected to be as accurate as BSP."""

    factor: float
    """Epochs under HAP divided by those under BSP."""
    source: str
    """`measured` (docs/convergence.md) or `given`."""
    bsp: int
    """Epochs of configurations under BSP in this plan; `hap`: of those under HAP, rounded."""
    hap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Result of `ephemeron plan`."""

    choice: Choice
    search: SearchReport
    minimise: str
    """`cost` or `time`."""
    epochs: int = 0
    """Epochs of the choice. 0: unknown, in plans of earlier releases."""
    hap_epochs: HapEpochs | None = None
    """Epochs that HAP is planned with, so that configurations are compared at equal accuracy."""
    limits: PlanLimits = field(default_factory=PlanLimits)
    """Deadline and budget as asked, and the largest global batch that was searched."""
    binding: str
    """The binding constraint: a limit that holds the optimum back, or else the phase that takes longest."""
    compared: tuple[Alternative, ...] = ()
    """The configurations that a person would choose between, within the limits or not."""
    alternatives: tuple[Alternative, ...] = ()
    """Neighbours: next best W, one worker more or less, one memory step more or less."""
    uncertainty: Uncertainty | None = None
    extrapolated: tuple[str, ...] = ()
    """Sizes and quotas of the choice beyond those that were measured."""
    advice: tuple[str, ...] = ()
    """Sentences for people."""
    machines: tuple[MachineEstimate, ...] = ()
    """At most six, cheapest first."""
    gpus: tuple[GpuEstimate, ...] = ()
    beyond: Mapping[str, float] = field(default_factory=dict)
    """`arm64_usd` and `egress_usd`, as far as the price file has them: `rented.beyond`."""
    front: tuple[Choice, ...] = ()
    """Pareto front of time and cost, fastest first."""
    profile: PlanSource = field(default_factory=PlanSource)

    def to_json(self) -> str:
        """The contract of `ephemeron plan --json`: the fields of the choice and of the plan in one table."""
        table = typed.plain(self)
        return json.dumps({**table.pop("choice"), **table})

    def save(self, path: Path) -> None:
        """Writes `plan.json`."""
        path.write_text(json.dumps(json.loads(self.to_json()), indent=2) + "\n")


class StoredPlan(Protocol):
    """A plan of any kind of job, as a run stores it: `predicted` in its document has at least `seconds` and `cost_usd`."""

    def save(self, path: Path) -> None:
        """Writes `plan.json`."""


def load_plan(path: str | Path) -> Plan:
    """Reads what `save` wrote.

    Raises:
        JobError: absent or not a plan.
    """
    try:
        return parse_plan(json.loads(Path(path).read_text()), where=f"plan {path}")
    except OSError as e:
        raise JobError(f"plan {path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise JobError(f"plan {path} is not a plan: {e}") from None


def parse_plan(raw: object, *, where: str = "plan") -> Plan:
    """A plan from the table that `to_json` writes.

    Raises:
        JobError: names what is missing, unknown or of another type.
    """
    if not isinstance(raw, Mapping):
        raise JobError(f"{where} is not a plan: expected a table")
    names = {f.name for f in fields(Choice)}
    choice = {k: v for k, v in raw.items() if k in names}
    return typed.build(Plan, {**{k: v for k, v in raw.items() if k not in names}, "choice": choice}, where=where)


# -- conversion of a plan's choice into a configuration for `train` -----------------------------------------------


EXPLICIT = (
    "stages.count",
    "stages.replicas",
    "stages.placement",
    "workers",
    "aggregators",
    "memory_mb",
    "batch_size",
    "nonaggregator_batch_size",
    "pattern",
    "sync",
    "exchange.compression",
)
"""Dotted names of options that say how to run; where a user gives any of them, nothing is planned."""


def overrides(choice: Choice) -> dict[str, Any]:
    """The choice in the names of `Configuration`. The user gives the channel's address."""
    return {
        "workers": choice.workers,
        "aggregators": choice.aggregators,
        "memory_mb": choice.memory_mb,
        "batch_size": choice.batch_size_aggregator,
        "nonaggregator_batch_size": choice.batch_size_nonaggregator,
        "pattern": choice.pattern,
        "sync": choice.sync,
        "exchange": {"compression": choice.compression, "local_steps": choice.local_steps},
    }
