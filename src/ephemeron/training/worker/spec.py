"""Specification of a run, which each function reads first: one JSON object, `RUN/spec`, without secrets and without code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from ephemeron.config.typed import build
from ephemeron.data import SampleSplit, plan_split
from ephemeron.data.flow_spec import FlowSpec
from ephemeron.data.split import LastBatch
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.training.collectives.chunking import CHUNK_BYTES
from ephemeron.training.job import Configuration, Script, Target, TrainingOptions
from ephemeron.training.planner.prices import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A model that is divided among several functions. Rank = stage · replicas + replica."""

    replicas: int
    """Functions that hold the same stage, R."""
    micro_batches: int
    schedule: str
    recompute: bool
    fed: tuple[bool, ...]
    """By stage: whether it reads samples, inputs or targets."""
    shares: tuple[float, ...]
    """By stage: estimated part of the model's computing."""
    test_samples: tuple[int, ...]
    """By replica: its slice of the test set."""
    evaluates: bool
    """Whether the divided model can be evaluated; else metrics are None."""

    @property
    def count(self) -> int:
        """Number of stages, S."""
        return len(self.fed)

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and replica of a rank."""
        return divmod(rank, self.replicas)

    def rank(self, stage: int, replica: int) -> int:
        """The inverse of `place`."""
        return stage * self.replicas + replica


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptLoop:
    """A script with a loop of its own, as its trial found it."""

    script: Script
    epoch_length: int
    """Iterations of an epoch."""
    global_batch: int
    """Samples of the largest batch over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run, as its workers read it."""

    run_id: str
    name: str = ""
    """Name of the job."""
    model: Target
    loss: Target
    optimizer: Target
    task: Target | None = None
    """Task, in place of model, loss and optimiser."""
    script: ScriptLoop | None = None
    """Script, in place of all these."""
    options: TrainingOptions = field(default_factory=TrainingOptions)
    """How the program is trained."""
    shares_evaluations: bool = False
    """Whether functions merge their evaluations: metrics that are no sums, or decisions that depend on them."""
    time_limit_s: float | None = None
    """Run time after which the run stops with a checkpoint."""
    configuration: Configuration
    epochs: int
    seed: int
    dtype: str
    samples: int
    """Size of the training set."""
    prices: Prices
    budget_usd: float | None = None
    faults: tuple[str, ...] = ()
    peer_timeout_s: float = 20.0
    """Shortest wait before a peer is suspected; slow iterations make it longer."""
    cold_start_s: float = 3.0
    """Expected time of a cold start."""
    trainer: str = "torch"
    """`torch`; `script`; `synthetic` or `counting` for studies in which gradients do not matter."""
    trainer_options: Mapping[str, int] = field(default_factory=dict)
    """Arguments of a trainer for studies."""
    last_batch: LastBatch = "keep"
    """Treatment of the partial iteration of an epoch."""
    flow: FlowSpec | None = None
    """Flow from which functions read their samples; None: the driver stores their samples in the channel."""
    stages: Stages | None = None
    """None: every function holds the whole model."""
    chunk_bytes: int = CHUNK_BYTES
    """Chunk size of the pipelined form, from the store's request times; 0: the plain form is faster."""

    @property
    def split(self) -> SampleSplit:
        """Number of samples of each rank, or replica."""
        batches = self.proportions
        if self.script is None:
            return plan_split(self.samples, batches, last=self.last_batch)
        loop, shares = self.script, plan_split(self.script.global_batch, batches).counts
        # As many samples as give an epoch of this length: a loader may drop some, or have batches of several sizes.
        least = (loop.epoch_length - 1) * loop.global_batch + 1
        samples = min(max(self.samples, least), loop.epoch_length * loop.global_batch)
        return plan_split(samples, shares)

    @property
    def proportions(self) -> tuple[int, ...]:
        """Samples of an iteration by rank: a batch for each local step. Ranks share the batches of a script in proportion to them."""
        c = self.configuration
        return tuple(c.batch_of(r) * c.local_steps for r in range(c.group))

    @property
    def program(self) -> str:
        """Name of the model, the task or the script."""
        if self.script is not None:
            return self.script.script.file
        return (self.task or self.model).target

    def member(self, rank: int) -> int:
        """Number of a rank among those that share the batch: the rank itself, or its replica of the pipeline."""
        return rank if self.stages is None else self.stages.place(rank)[1]

    @property
    def most_replacements(self) -> int:
        """Number of functions that may be replaced in the run."""
        c = self.configuration
        return c.max_replacements or max(100, 20 * c.workers)

    @property
    def iterations(self) -> int:
        """Iterations of the whole run, unless it ends early."""
        return self.split.iterations * self.epochs

    @property
    def evaluation_interval(self) -> int:
        """Iterations between two evaluations."""
        number, unit = self.options.evaluate_every.split(" ")
        return int(number) * (self.split.iterations if unit.startswith("epoch") else 1)

    def evaluates_at(self, iteration: int) -> bool:
        """Whether the model is evaluated before `iteration` is computed, or at the end."""
        return iteration > 0 and (iteration % self.evaluation_interval == 0 or iteration == self.iterations)

    @property
    def learning_rate_factor(self) -> float:
        """Factor of learning rates by the linear scaling rule; 1 unless the option is set."""
        c = self.configuration
        return c.global_batch / c.batch_size if self.options.scale_learning_rate else 1.0

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: memoryview | bytes) -> RunSpec:
        """The inverse of `to_bytes`.

        Raises:
            CorruptMessage: not a specification of this release.
        """
        try:
            return build(cls, json.loads(bytes(data)), where="spec")
        except (ValueError, JobError) as e:
            raise CorruptMessage(f"not a run specification of this release: {e}") from None
