"""A training job (`Job`) and how it is run (`Configuration`): frozen values whose types say what each may be.

The same types check job files, values built in Python and JSON (`ephemeron.config.typed`), and the JSON schema of job files
is generated from them (`ephemeron.config.schema`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast, get_args

from ephemeron.communication.channels.address import is_direct, store_address
from ephemeron.config.typed import AtLeast, Count, Form, NonNegative, Partial, Positive, Typed, Within
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.world import Simulation
from ephemeron.training.job.former_names import refuse_former_names
from ephemeron.training.job.generation import ScheduledResize
from ephemeron.training.job.logger_spec import LoggerSpec
from ephemeron.training.job.sparse_spec import SparseSpec
from ephemeron.training.job.target import Target as Target

PlatformName = Literal["local", "simulated", "aws", "aws-microvm", "openfaas", "ray", "lithops"]
Pattern = Literal["k-reduce", "all-reduce", "scatter-reduce", "pipelined", "parameter-server", "standalone"]
ExchangeQuantity = Literal["gradients", "parameters", "deltas"]
Compression = Literal["none", "bf16", "int8", "sparse"]
OnNonFinite = Literal["stop", "continue"]
ScheduleName = Literal["plain", "gpipe", "1f1b"]
Precision = Literal["32-true", "bf16-mixed"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Mode = Literal["min", "max"]
Staleness = Literal["auto", "none"]
SyncName = Literal["bsp", "ssp", "asp", "hap", "hsp"]
RegionPlanMethod = Literal["match", "cheapest", "fastest", "all"]

PLATFORMS: tuple[str, ...] = get_args(PlatformName)
PATTERNS: tuple[str, ...] = get_args(Pattern)
EXCHANGES: tuple[str, ...] = get_args(ExchangeQuantity)
COMPRESSIONS: tuple[str, ...] = get_args(Compression)
ON_NON_FINITE: tuple[str, ...] = get_args(OnNonFinite)
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
REGION_PLANS: tuple[str, ...] = get_args(RegionPlanMethod)

AVERAGE = "average"
"""Outer optimiser that adds the mean of the ranks' changes to the parameters."""
OF_TASK = "(of the task)"
"""Target of the model of a job that names a task."""
PROGRAMS = ("model", "task", "script", "sparse")
"""Fields of a job of which exactly one is given."""
_OrDefault = Annotated[int, AtLeast(0)]
"""A count; 0: a default that depends on other values."""
_EVERY = Form(r"[1-9][0-9]{0,14} (steps?|epochs?)", "N steps or N epochs, such as '100 steps' or '1 epoch'")
EpochsFactor: TypeAlias = Annotated[float, AtLeast(1)]
"""Epochs that a protocol needs, divided by those of BSP."""
_REGION_SYNC = Form(
    r"(auto|asgd|asgd-ga|ama|sma|diloco)(:(auto|[a-z]+=[0-9.e-]+)(,[a-z]+=[0-9.e-]+)*)?",
    "auto, asgd, asgd-ga, ama, sma or diloco, and options, such as diloco:fragments=4,delay=5 or diloco:auto,limit=100",
)
_REGION_COMPRESSION = Form(r"none|int8|int4|topk2?:[0-9.e-]+", "none, int8, int4, topk:SHARE or topk2:SHARE")
_SYNC = Form(r"bsp|hap|hsp|asp|ssp:[0-9]+", "bsp, hap, hsp, asp or ssp:N with N ≥ 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script(Typed):
    """A Python script with a training loop of its own (`ephemeron.current()`)."""

    file: str
    """Path of the script, relative to one of the folders in `code`."""
    arguments: tuple[str, ...] = ()
    """Its command-line arguments."""

    def find(self, folders: Sequence[Path]) -> Path:
        """The script in the first folder that has it.

        Raises:
            JobError: none has it.
        """
        for folder in folders:
            if (folder / self.file).is_file():
                return folder / self.file
        listed = ", ".join(map(str, folders)) or "no folders"
        raise JobError(f"there is no script {self.file} in {listed}", remedy="name it relative to a folder of 'code'")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits(Typed):
    """Limits on time, cost and batch size."""

    deadline_s: Positive | None = None
    """Longest duration of the run, seconds. Plans and launches that cannot meet it are refused."""
    budget_usd: Positive | None = None
    """Largest cost of the run, US dollars. A run that reaches it stops with a checkpoint."""
    time_limit_s: Positive | None = None
    """Time after which the run stops with a checkpoint, seconds. It can be resumed."""
    max_global_batch: Count | None = None
    """Samples per iteration over all workers, at most (FasDL, equation 3-30: larger batches need more epochs)."""
    hap_epochs_factor: EpochsFactor | None = None
    """Epochs that HAP needs for BSP's accuracy, divided by BSP's, for plans; None: the measured factor (docs/convergence.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRegion(Typed):
    """A region of a run: functions that train on their share of the data, on a platform and over a channel of their own."""

    name: Annotated[str, Form(r"[a-z][a-z0-9-]{0,23}", "up to 24 small letters, digits and hyphens, a letter first")]
    """Name, unlike that of every other region."""
    workers: Count
    """Number of its functions."""
    most_workers: _OrDefault = 0
    """Functions that a new plan may give it while it trains; 0: never more than `workers`."""
    platform: PlatformName | None = None
    """Platform; None: that of the run."""
    channel: str | None = None
    """Address of its channel; None: that of the run."""
    memory_mb: Annotated[int, Within(0, 10_000_000)] = 0
    """Quota of each of its functions, MB; 0: the platform's default."""
    aggregators: _OrDefault = 0
    """K; 0: what the pattern implies."""
    batch_size: _OrDefault = 0
    """Samples per optimiser step of an aggregator; 0: that of the run."""
    nonaggregator_batch_size: _OrDefault = 0
    """Samples per optimiser step of a non-aggregator; 0: as `batch_size`."""
    function_timeout_s: NonNegative = 0.0
    """Time limit of an invocation, seconds; 0: the platform's limit."""
    exchange_every: _OrDefault = 0
    """H of this region; 0: that of the run for the region of the fewest iterations, and for the others so many times more that all exchange equally often."""
    share: Positive | None = None
    """Its part of the training samples, relative to those of the other regions; None: its samples per iteration."""
    data: DataSpec | None = None
    """Samples of its own, in place of a part of the job's: no other region gets any of them."""
    credentials: Annotated[
        str, Form(r"[A-Za-z][A-Za-z0-9_]*|", "letters, digits and underscores: the beginning of names of environment variables")
    ] = ""
    """Beginning of the names of environment variables of the client that its functions and its channel get, without it; "": none."""
    power: Positive = 1.0
    """Speed of its devices relative to those of the other regions; in the simulator its functions compute so much faster."""
    prices: Path | None = None
    """Price file; None: the built-in prices."""
    listen: str = ""
    """`HOST:PORT` at which its rank 0 accepts connections of other regions; "": it only connects outwards."""
    endpoint: str = ""
    """Address at which other regions reach it; "": the one at which it listens."""
    certificate: Path | None = None
    """PEM file of its certificate, for connections of regions; None: they are not encrypted."""
    certificate_key: Path | None = None
    """PEM file of the certificate's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions(Typed):
    """What functions exchange in each iteration: the table `[run.exchange]`."""

    quantity: ExchangeQuantity | None = None
    """Quantity that functions exchange; None: gradients, or with several local steps deltas."""
    local_steps: Count = 1
    """H: batches that a function trains on, with an optimiser step each, in every iteration, which ends with one exchange."""
    outer_optimizer: Target = field(default_factory=lambda: Target(target=AVERAGE), hash=False)
    """Optimiser that is given the merged deltas as gradients: `average`, or a name in `torch.optim` and its options."""
    compression: Compression = "none"
    """Compression of the exchange; int8 has error feedback, sparse loses nothing."""
    ranks_per_machine: Count = 1
    """L, on direct channels under BSP: L neighbours by rank share a machine. Their contributions are added up there first, so that an L-th as
    much is sent between machines. Results are those of all runs with the same L."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions(Typed):
    """How a model is divided among several functions: the table `[run.stages]`."""

    count: Count = 1
    """S: functions among which each copy of the model is divided, layer by layer; `workers` is S times `replicas`."""
    replicas: _OrDefault = 0
    """R: copies of the model, each with its share of the batch; 0: `workers` / `count`."""
    micro_batches: Count = 1
    """Parts into which a replica's batch is divided, to be processed by several stages at once."""
    schedule: ScheduleName | None = None
    """Order of micro-batches on a stage; None: 1f1b if there are several micro-batches, else plain."""
    recompute: bool = False
    """Stages keep the inputs of micro-batches instead of all activations, and repeat their forward passes."""
    placement: str = ""
    """Path of a file written by `ephemeron partition --out`; "": stages are found before the launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeOptions(Typed):
    """How the functions change during the run: the table `[run.resize]`."""

    schedule: tuple[ScheduledResize, ...] = ()
    """Changes at given epochs, as tables `[[run.resize.schedule]]`."""
    policy: Target | None = None
    """`module:Class` of an `ephemeron.Schedule`, or `module:function`, that decides after each epoch how the functions change."""
    adapt: bool = False
    """The client changes the number of functions when the deadline or the budget is about to be missed."""

    @property
    def asks(self) -> bool:
        """Whether it is decided during the run how the functions change."""
        return self.policy is not None or self.adapt


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOptions(Typed):
    """Regions, each with functions of its own, and how they exchange: the table `[run.regions]`. Without regions all functions are one group."""

    file: Path | None = None
    """Path of a `regions.toml`, in place of `region`."""
    region: tuple[RunRegion, ...] = ()
    """Regions, at least two, as tables `[[run.regions.region]]`."""
    plan: RegionPlanMethod | None = None
    """Functions of the regions of a file that have no `workers`: `match` (computing power in proportion to the data), `cheapest` or `fastest`
    (exact), `all` (what their devices have cores for). None: the `plan` of the file, or `match`."""
    exchange_every: Count = 10
    """H: iterations between two exchanges of the regions."""
    sync: Annotated[str, _REGION_SYNC] = "sma"
    """What regions exchange and when they wait for each other: `asgd`, `asgd-ga`, `ama`, `sma`, `diloco`, with options as in
    `diloco:fragments=4,delay=5`; `auto` is `diloco:auto`, which follows the measured link."""
    compression: Annotated[str, _REGION_COMPRESSION] = "none"
    """Compression of what regions exchange, with error feedback: `none`, `int8`, `int4`, `topk:SHARE`, `topk2:SHARE`."""
    least_regions: Count = 1
    """Regions that can be started when the run begins, at least; with fewer it fails. Others join when they can."""
    replan_every_s: NonNegative = 0.0
    """Seconds between two new plans for the functions of regions that train, from measured iteration times; 0: none."""
    store: str = ""
    """Address of the store through which regions exchange parameters; "": a folder, where all regions run on this machine."""
    communicator: Literal["store", "tcp"] = "store"
    """How regions exchange: through `store`, or over TCP connections of their ranks 0, with the store for their addresses."""
    relay: str = ""
    """Address of a rendezvous service that relays connections of regions which nothing can connect to."""
    authority: Path | None = None
    """PEM file of the authority that signs the certificates of regions."""

    @property
    def given(self) -> bool:
        """Whether there are regions."""
        return self.file is not None or bool(self.region)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration(Typed):
    """Options of a run, chosen by a plan or given as flags."""

    platform: PlatformName = "local"
    """Platform on which functions run."""
    channel: str = "folder"
    """Address of the store through which functions exchange parameters: `folder`, `memory`, `file:///…`, `s3://bucket/prefix`, `gs://…`, `az://…`, `redis://host:port`, `parameter_server`, `ps://host:port`; or `direct`, `direct+STORE`: functions send it to each other, and STORE is for all else."""
    pattern: Pattern = "k-reduce"
    """Pattern of the reduction of contributions."""
    sync: Annotated[str, _SYNC] = "bsp"
    """Synchronisation protocol: `bsp`, `ssp:N`, `asp`, `hap`, `hsp`."""
    workers: Count = 4
    """W: number of functions."""
    aggregators: _OrDefault = 0
    """K of K-REDUCE; 0: what the pattern implies (`all-reduce` 1, `scatter-reduce` and `pipelined` W), else W on direct channels
    and min(2, W) on others."""
    memory_mb: Annotated[int, Within(0, 10_000_000)] = 0
    """Quota of each function, MB; 0: the platform's default for this number of workers, or more if the model needs it."""
    memory_is_default: bool = False
    """`memory_mb` is a default: it is raised for a model that needs more."""
    batch_size: Count = 16
    """Samples per optimiser step of an aggregator (FasDL: B^a)."""
    nonaggregator_batch_size: _OrDefault = 0
    """Samples per optimiser step of a non-aggregator (B^n); 0: as `batch_size`."""
    function_timeout_s: NonNegative = 0.0
    """Time limit of an invocation, seconds; 0: the platform's limit. Longer runs are handed off to successors."""
    checkpoint_every: Count = 25
    """Iterations between checkpoints. A replacement repeats at most twice as many."""
    max_replacements: _OrDefault = 0
    """Functions that may be replaced before the run fails; 0: 20 for each worker, and 100 at least."""
    on_non_finite: OnNonFinite = "stop"
    """`stop` the run at the first loss, gradient or parameter that is NaN or infinite, or `continue`."""
    channel_retry_s: NonNegative = 300.0
    """Seconds for which failed requests to the channel are repeated (requests that are refused are not)."""
    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)
    """What functions exchange in each iteration."""
    stages: StageOptions = field(default_factory=StageOptions)
    """How the model is divided among several functions."""
    resize: ResizeOptions = field(default_factory=ResizeOptions)
    """How the functions change during the run."""
    regions: RegionOptions = field(default_factory=RegionOptions)
    """Regions, each with functions of its own, and how they exchange."""

    @property
    def direct(self) -> bool:
        """Whether functions exchange gradients and activations without the store."""
        return is_direct(self.channel)

    @property
    def store(self) -> str:
        """Address of the store."""
        return store_address(self.channel)

    @property
    def group(self) -> int:
        """Ranks that share the batch and reduce gradients together: all, or the replicas of a stage."""
        return self.workers // self.stages.count

    def resolved(self) -> Configuration:
        """This configuration with its defaults filled in.

        Raises:
            JobError: two values contradict each other.
        """
        schedule = self._micro_batch_schedule()
        members = self._members()
        fixed = {"all-reduce": 1, "scatter-reduce": members, "standalone": 1}.get(self.pattern)
        most = self.pattern == "pipelined" or self.direct
        k = self.aggregators or fixed or (members if most else min(2, members))
        if fixed is not None and k != fixed:
            raise JobError(
                f"aggregators = {k} contradicts pattern '{self.pattern}', which has {fixed}",
                remedy="leave aggregators out, or use pattern 'k-reduce'",
            )
        if k > members:
            kind = "workers" if self.stages.count == 1 else "replicas"
            raise JobError(
                f"aggregators = {k} is more than {kind} = {members}", remedy=f"aggregators are {kind} too: choose 1 ≤ aggregators ≤ {kind}"
            )
        if self.pattern == "standalone" and self.workers != 1:
            raise JobError(f"pattern 'standalone' is one function, but workers = {self.workers}", remedy="use workers = 1")
        return dataclasses.replace(
            self,
            aggregators=k,
            nonaggregator_batch_size=self.nonaggregator_batch_size or self.batch_size,
            exchange=dataclasses.replace(self.exchange, quantity=self.exchanged),
            stages=dataclasses.replace(
                self.stages, schedule=schedule if self.stages.count > 1 else None, replicas=members if self.stages.count > 1 else 0
            ),
        )

    def _micro_batch_schedule(self) -> ScheduleName:
        stages = self.stages
        if self.resize.schedule and stages.count > 1:
            raise JobError(
                "the functions of a model on several functions cannot change during a run",
                remedy="leave [[run.resize.schedule]] out, or use stages.count = 1",
            )
        schedule = stages.schedule or ("1f1b" if stages.micro_batches > 1 else "plain")
        if schedule == "plain" and stages.micro_batches > 1:
            raise JobError(
                f"stages.schedule 'plain' takes the batch whole, but micro_batches = {stages.micro_batches}",
                remedy="use stages.schedule 1f1b or gpipe",
            )
        if schedule == "plain" and stages.recompute:
            raise JobError("stages.recompute is for several micro-batches, and there is one", remedy="say stages.micro_batches = 2")
        return schedule

    def _members(self) -> int:
        """Ranks of a group."""
        stages = self.stages
        if stages.count == 1 and (stages.micro_batches > 1 or stages.placement):
            raise JobError(
                "stages.micro_batches and stages.placement are for a model on several functions, and stages.count = 1",
                remedy="say stages.count = 2 or more",
            )
        members, rest = divmod(self.workers, stages.count)
        if rest or members == 0 or stages.replicas not in (0, members):
            raise JobError(
                f"workers = {self.workers} are not stages.count × replicas = {stages.count} × {stages.replicas or '…'}",
                remedy="leave workers out",
            )
        return members

    @property
    def exchanged(self) -> ExchangeQuantity:
        """`exchange.quantity`, or its default."""
        return self.exchange.quantity or ("gradients" if self.exchange.local_steps == 1 else "deltas")

    @property
    def global_batch(self) -> int:
        """FasDL, equation 3-14: B^g = B^a·K + B^n·(W−K), samples of one optimiser step. Needs a resolved configuration."""
        k, w = self.aggregators, self.group
        return self.batch_size * k + self.nonaggregator_batch_size * (w - k)

    def batch_of(self, rank: int) -> int:
        """Batch size of a rank of a group: ranks below K aggregate."""
        return self.batch_size if rank < self.aggregators else self.nonaggregator_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec(Typed):
    """A learning-rate scheduler."""

    target: str
    """A name in `torch.optim.lr_scheduler`, or `module:function` that takes the optimiser."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments. Where the length of the schedule (`T_max`, `total_steps`, `total_iters`) is left out, it is the run's."""
    interval: Literal["step", "epoch"] = "epoch"
    """Advance after every optimiser step or after every epoch."""
    monitor: str | None = None
    """Metric that the scheduler is given, for `ReduceLROnPlateau`: it then advances after every evaluation."""
    warmup_steps: Annotated[int, AtLeast(0)] = 0
    """Steps of linear warm-up before the schedule; needs interval `step`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping(Typed):
    """End of the run when a metric has stopped improving, or has reached a value. All functions decide alike, from the merged metric."""

    monitor: str = "loss"
    """Metric of the evaluation."""
    mode: Mode = "min"
    """`min`: lower is better; `max`: higher is better."""
    patience: Count = 3
    """Evaluations without improvement after which the run ends."""
    min_delta: NonNegative = 0.0
    """Smallest change that counts as an improvement."""
    threshold: float | None = None
    """Value at which the run ends: the metric is as good, or better; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest(Typed):
    """Weights of the best evaluations, kept beside the last ones."""

    monitor: str = "loss"
    """Metric of the evaluation."""
    mode: Mode = "min"
    """`min`: lower is better; `max`: higher is better."""
    count: Count = 1
    """Number of evaluations whose weights are kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Typed):
    """How a program is trained, apart from its model, loss and data: steps, evaluations, and what ends the run."""

    scheduler: SchedulerSpec | None = None
    """Learning-rate scheduler, for every optimiser whose program sets none."""
    clip_norm: Positive | None = None
    """Largest norm of the merged gradient of all parameters; larger gradients are scaled down to it."""
    clip_value: Positive | None = None
    """Largest absolute value of an element of the merged gradient."""
    accumulate: Count = 1
    """Parts into which a function's batch, that of one optimiser step, is divided; their gradients are added up before the exchange. Needs less memory."""
    precision: Precision = "32-true"
    """`32-true`, or `bf16-mixed`: forward passes under `torch.autocast` in bfloat16."""
    ema_decay: Annotated[float, Within(0, 1, open_maximum=True)] = 0.0
    """Decay of an exponential moving average of the weights, which is evaluated and saved instead of them; 0: none."""
    compile: bool = False
    """Compile the model with `torch.compile`. Needs a C++ compiler on the functions."""
    scale_learning_rate: bool = False
    """Multiply learning rates by global batch / batch size (linear scaling rule)."""
    evaluate_every: Annotated[str, _EVERY] = "1 epoch"
    """Interval of evaluations: `N steps` or `N epochs`. The end of the run is evaluated in any case."""
    early_stopping: EarlyStopping | None = None
    """End of the run when a metric has stopped improving."""
    keep_best: KeepBest | None = None
    """Weights of the best evaluations, as files beside the result."""
    keep_last: _OrDefault = 0
    """Number of latest evaluations whose weights are kept, as files beside the result."""
    staleness: Staleness = "auto"
    """`auto`: under HAP, SSP, ASP and HSP, gradients are computed after provisional steps with the rank's own gradients that are not
    merged yet; `none`: at the stale parameters."""
    device: Device = "auto"
    """Device on which functions compute; `auto`: an accelerator if the function has one."""

    @property
    def decides(self) -> bool:
        """Whether evaluations decide something, so that all functions need the metrics of the whole test set."""
        monitors = self.scheduler is not None and self.scheduler.monitor is not None
        return monitors or self.early_stopping is not None or self.keep_best is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobHead(Typed):
    """Fields of a job that come first in its documents."""

    name: str
    """Name of the job; in a file, the file's name by default. Run names begin with it."""
    model: Target = field(default_factory=lambda: Target(target=OF_TASK))
    """`module:function` that returns a `torch.nn.Module`."""
    task: Target | None = None
    """`module:Class` of an `ephemeron.Task`, in place of `model`, `loss` and `optimizer`."""
    script: Script | None = None
    """Python script with a training loop of its own, in place of `model`, `loss`, `optimizer`, `data` and `epochs`."""
    sparse: SparseSpec | None = None
    """Sparse model that functions train through a sparse store, in place of `model`, `loss` and `optimizer`."""
    loss: Target = field(default_factory=lambda: Target(target="cross_entropy"))
    """A name in `torch.nn.functional`, or `module:function`. Must average over the batch."""
    optimizer: Target = field(default_factory=lambda: Target(target="SGD", options={"lr": 0.1}))
    """A name in `torch.optim` and its options."""
    data: DataSpec = field(default_factory=DataSpec)
    """Samples to train on and to test with."""
    epochs: Count = 10
    """Passes over the training samples."""
    seed: int = 0
    """Seed of initial weights, shuffling, dropout and augmentation."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number type of parameters and of floating-point inputs."""
    limits: JobLimits = field(default_factory=JobLimits)
    """Limits of time, cost and batch size."""
    code: tuple[Path, ...] = ()
    """Folders whose files are sent to the functions; see `ephemeron.config.code_bundle`. In a file they are relative to it,
    and its own folder is the default."""
    code_include: tuple[str, ...] = ()
    """Patterns of files that are sent to the functions in any case, such as `*.safetensors` or `data/labels.csv`."""
    code_exclude: tuple[str, ...] = ()
    """Patterns of files and folders that are not sent."""
    simulation: Simulation = field(default_factory=Simulation)
    """The platform that `--platform simulated` imitates."""


@dataclass(frozen=True, kw_only=True)
class Job(TrainingOptions, _JobHead):
    """A model, its data and optimiser, and the limits of its training."""

    init: Path | None = None
    """Safetensors file with weights to start from. Names that the model lacks, and names that are missing, are reported."""
    loggers: tuple[LoggerSpec, ...] = ()
    """Programs that record the run: `csv`, `tensorboard`, `mlflow`, `wandb`, by name or as tables with options."""
    run: Annotated[Mapping[str, object], Partial(Configuration)] = field(default_factory=dict)
    """Defaults for `Configuration`; flags of `train` and arguments of `configure` override them."""

    def __post_init__(self) -> None:
        if isinstance(self.run, Mapping):
            refuse_former_names(self.run, where="Job: run.")
        super().__post_init__()
        given = {
            "model": self.model.target != OF_TASK,
            "task": self.task is not None,
            "script": self.script is not None,
            "sparse": self.sparse is not None,
        }
        check_program([name for name, is_given in given.items() if is_given], where="Job")

    @property
    def program(self) -> Target:
        """The task, or the model of a job without one; a script by its file."""
        if self.script is not None:
            return Target(target=self.script.file)
        if self.sparse is not None:
            return Target(target=self.sparse.model.target, options=self.sparse.model.options)
        return self.model if self.task is None else self.task

    @property
    def options(self) -> TrainingOptions:
        """How the program is trained."""
        return TrainingOptions(**{f.name: getattr(self, f.name) for f in dataclasses.fields(TrainingOptions)})


def check_program(given: Sequence[str], *, where: str) -> None:
    """Refuses a job that names no program, or two.

    Args:
        given: those of `PROGRAMS` that are given.

    Raises:
        JobError: it is not exactly one.
    """
    if len(given) != 1:
        says = f"both {given[0]} and {given[1]} are given" if given else "missing key model"
        raise JobError(f"{where}: {says}", remedy="name a model with its loss and optimizer, a task, a script, or a sparse model")


def sync_name(text: str) -> tuple[SyncName, int]:
    """`'ssp:3' -> ('ssp', 3)`.

    Raises:
        JobError: no such protocol.
    """
    if _SYNC.pattern.fullmatch(text) is None:
        raise JobError(f"sync = {text!r} is not known", remedy=f"use {_SYNC.phrase}")
    name, _, bound = text.partition(":")
    return cast(SyncName, name), int(bound or 0)


def check_limits(job: Job, configuration: Configuration) -> None:
    """Refuses a configuration that the user's own limits forbid.

    Raises:
        PlanInfeasible: the global batch is larger than allowed.
    """
    largest = job.limits.max_global_batch
    if largest is not None and configuration.global_batch > largest:
        raise PlanInfeasible(
            f"global batch {configuration.global_batch} is larger than max_global_batch = {largest}; use fewer workers or smaller batches",
            binding="max_global_batch",
        )
