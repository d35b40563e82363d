"""What the user wants (`Job`) and how it shall be run (`Configuration`): frozen values, parsed once at the edge."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ephemeron.config.typed import Typed
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.world import Simulation

Pattern = Literal["k-reduce", "all-reduce", "scatter-reduce", "pipelined", "parameter-server", "standalone"]
Exchange = Literal["gradients", "parameters"]
Compression = Literal["none", "bf16", "int8"]
OnNonFinite = Literal["stop", "continue"]
SyncName = Literal["bsp", "ssp", "asp", "hap"]

PATTERNS: tuple[str, ...] = get_args(Pattern)
EXCHANGES: tuple[str, ...] = get_args(Exchange)
COMPRESSIONS: tuple[str, ...] = get_args(Compression)
ON_NON_FINITE: tuple[str, ...] = get_args(OnNonFinite)
SCHEDULES = ("plain", "gpipe", "1f1b")
PLATFORMS = ("local", "simulated", "aws", "openfaas", "ray", "lithops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Typed):
    """A Python object named `module:name`, and the keyword arguments to call it with."""

    target: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits(Typed):
    """What the user will accept."""

    deadline_s: float | None = None
    budget_usd: float | None = None
    """A run that reaches it stops with a checkpoint."""
    max_global_batch: int | None = None
    """FasDL, equation 3-30: larger global batches need more epochs to the same loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Typed):
    """What to train, and within which limits."""

    name: str
    model: Target
    """`module:function` that returns a `torch.nn.Module`."""
    loss: Target = field(default_factory=lambda: Target(target="cross_entropy"))
    """A name in `torch.nn.functional`, or `module:function`. Must average over the batch."""
    optimizer: Target = field(default_factory=lambda: Target(target="SGD", options={"lr": 0.1}))
    """A name in `torch.optim` and its options."""
    data: DataSpec = field(default_factory=DataSpec)
    epochs: int = 10
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    limits: JobLimits = field(default_factory=JobLimits)
    code: tuple[Path, ...] = ()
    """Folders (absolute) whose files travel to the functions; see `ephemeron.config.code_bundle`."""
    code_include: tuple[str, ...] = ()
    """Patterns of files that travel in any case, such as `*.safetensors` or `data/labels.csv`."""
    code_exclude: tuple[str, ...] = ()
    """Patterns of files and folders that stay."""
    simulation: Simulation = field(default_factory=Simulation)
    run: dict[str, Any] = field(default_factory=dict)
    """Defaults for `Configuration`; flags override them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How a job is run: what a plan chooses, or flags say."""

    platform: str = "local"
    channel: str = "folder"
    """`folder`, `memory`, `file:///…`, `s3://bucket/prefix`, `gs://…`, `az://…`, `redis://host:port`, `parameter_server`, `ps://host:port`."""
    pattern: Pattern = "k-reduce"
    sync: str = "bsp"
    """`bsp`, `ssp:N`, `asp`, `hap`."""
    workers: int = 4
    aggregators: int = 0
    """K of K-REDUCE; 0: what the pattern implies (`all-reduce` 1, `scatter-reduce` and `pipelined` W), else min(2, W)."""
    memory_mb: int = 0
    """Quota of each function; 0: the platform's default for this number of workers, or more if the model needs it."""
    memory_is_default: bool = False
    """Nobody chose `memory_mb`: a model that needs more gets it."""
    batch_size: int = 16
    """Samples per iteration of an aggregator (FasDL: B^a)."""
    nonaggregator_batch_size: int = 0
    """Samples per iteration of a non-aggregator (B^n); 0: as `batch_size`."""
    exchange: Exchange = "gradients"
    compression: Compression = "none"
    function_timeout_s: float = 0.0
    """Longest invocation; 0: the platform's limit. Longer runs relay."""
    checkpoint_every: int = 25
    """Iterations between checkpoints: what a replaced function has to repeat at most twice."""
    max_replacements: int = 0
    """Functions that may be replaced in a run before it is given up; 0: 20 for each worker, and 100 at least."""
    on_non_finite: OnNonFinite = "stop"
    """`stop` the run at the first loss, gradient or parameter that is NaN or infinite, or `continue`."""
    channel_retry_s: float = 300.0
    """Seconds without its store that a run survives: so long are failed requests repeated (refused ones are not)."""
    stages: int = 1
    """S: functions among which each copy of the model is divided, layer by layer; `workers` is S times `replicas`."""
    replicas: int = 0
    """R: copies of the model, each with its share of the batch; 0: `workers` / `stages`."""
    micro_batches: int = 1
    """Parts of a replica's batch that are under way between the stages at once."""
    schedule: str = ""
    """`plain`, `gpipe` or `1f1b`; "": 1f1b if there are several micro-batches, else plain."""
    recompute: bool = False
    """Stages keep the inputs of micro-batches under way instead of all activations, and repeat their forward passes."""
    placement: str = ""
    """File that `ephemeron partition --out` has written; "": stages are found before the launch."""

    @property
    def group(self) -> int:
        """Ranks that share the batch and reduce gradients together: all, or the replicas of a stage."""
        return self.workers // self.stages

    def resolved(self) -> Configuration:
        """This configuration with its defaults filled in and its contradictions refused.

        Raises:
            JobError: a value is out of range, or two values contradict each other.
        """
        _choice("platform", self.platform, PLATFORMS)
        _choice("pattern", self.pattern, PATTERNS)
        _choice("exchange", self.exchange, EXCHANGES)
        _choice("compression", self.compression, COMPRESSIONS)
        _choice("on_non_finite", self.on_non_finite, ON_NON_FINITE)
        for name, low in (("workers", 1), ("batch_size", 1), ("checkpoint_every", 1), ("aggregators", 0),
                          ("nonaggregator_batch_size", 0), ("memory_mb", 0), ("function_timeout_s", 0), ("stages", 1), ("max_replacements", 0),
                          ("replicas", 0), ("micro_batches", 1), ("channel_retry_s", 0)):  # fmt: skip
            value = getattr(self, name)
            if value < low:
                raise JobError(f"{name} = {value} is below {low}")
            if not math.isfinite(value):
                raise JobError(f"{name} = {value} is not finite")
        schedule = self._scheduled()
        members = self._members()
        fixed = {"all-reduce": 1, "scatter-reduce": members, "standalone": 1}.get(self.pattern)
        k = self.aggregators or fixed or (members if self.pattern == "pipelined" else min(2, members))
        if fixed is not None and k != fixed:
            raise JobError(
                f"aggregators = {k} contradicts pattern '{self.pattern}', which has {fixed}",
                remedy="leave aggregators out, or use pattern 'k-reduce'",
            )
        if k > members:
            kind = "workers" if self.stages == 1 else "replicas"
            raise JobError(
                f"aggregators = {k} is more than {kind} = {members}",
                remedy=f"aggregators are {kind} too: choose 1 ≤ aggregators ≤ {kind}",
            )
        if self.pattern == "standalone" and self.workers != 1:
            raise JobError(
                f"pattern 'standalone' is one function, but workers = {self.workers}", remedy="use workers = 1"
            )
        sync_name(self.sync)
        return dataclasses.replace(
            self, aggregators=k, nonaggregator_batch_size=self.nonaggregator_batch_size or self.batch_size,
            schedule=schedule if self.stages > 1 else "", replicas=members if self.stages > 1 else 0,
        )  # fmt: skip

    def _scheduled(self) -> str:
        schedule = self.schedule or ("1f1b" if self.micro_batches > 1 else "plain")
        _choice("schedule", schedule, SCHEDULES)
        if schedule == "plain" and self.micro_batches > 1:
            raise JobError(
                f"schedule 'plain' takes the batch whole, but micro_batches = {self.micro_batches}",
                remedy="use schedule 1f1b or gpipe",
            )
        if schedule == "plain" and self.recompute:
            raise JobError("recompute is for several micro-batches, and there is one", remedy="say micro_batches = 2")
        return schedule

    def _members(self) -> int:
        """Ranks of a group."""
        if self.stages == 1 and (self.micro_batches > 1 or self.placement):
            raise JobError(
                "micro_batches and placement are for a model on several functions, and stages = 1",
                remedy="say stages = 2 or more",
            )
        members, rest = divmod(self.workers, self.stages)
        if rest or members == 0 or self.replicas not in (0, members):
            raise JobError(
                f"workers = {self.workers} are not stages × replicas = {self.stages} × {self.replicas or '…'}",
                remedy="leave workers out",
            )
        return members

    @property
    def global_batch(self) -> int:
        """FasDL, equation 3-14: B^g = B^a·K + B^n·(W−K). Needs a resolved configuration."""
        k, w = self.aggregators, self.group
        return self.batch_size * k + self.nonaggregator_batch_size * (w - k)

    def batch_of(self, rank: int) -> int:
        """Batch size of a rank of a group: ranks below K aggregate."""
        return self.batch_size if rank < self.aggregators else self.nonaggregator_batch_size


def sync_name(text: str) -> tuple[SyncName, int]:
    """`'ssp:3' -> ('ssp', 3)`.

    Raises:
        JobError: no such protocol.
    """
    name, _, bound = text.partition(":")
    if name == "ssp" and bound.isdecimal():
        return "ssp", int(bound)
    if text in ("bsp", "asp", "hap"):
        return text, 0  # type: ignore[return-value]
    raise JobError(f"sync = {text!r} is not known", remedy="use bsp, hap, asp or ssp:N with N ≥ 0")


def check_limits(job: Job, configuration: Configuration) -> None:
    """Refuses a configuration that the user's own limits forbid.

    Raises:
        PlanInfeasible: the global batch is larger than allowed.
    """
    largest = job.limits.max_global_batch
    if largest is not None and configuration.global_batch > largest:
        raise PlanInfeasible(
            f"global batch {configuration.global_batch} is larger than max_global_batch = {largest}; "
            "use fewer workers or smaller batches",
            binding="max_global_batch",
        )


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise JobError(f"{name} = {value!r} is not known", remedy=f"use one of {', '.join(allowed)}")
