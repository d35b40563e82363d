"""Specification of a run, which each function reads first: one JSON object, `RUN/spec`, without secrets and without code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ephemeron.config.typed import build, plain
from ephemeron.data import SampleSplit, plan_split
from ephemeron.data.batch_source import Positions
from ephemeron.data.flow_spec import FlowSpec
from ephemeron.data.iteration_samples import GlobalSampler, Sampler, Timeline
from ephemeron.data.split import LastBatch
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.prices import Prices
from ephemeron.training.collectives.chunking import CHUNK_BYTES
from ephemeron.training.job import Configuration, Script, Target, TrainingOptions
from ephemeron.training.job.former_names import with_names_of_today
from ephemeron.training.job.generation import Generation, Resize, resized_values
from ephemeron.training.job.sparse_spec import SparseProgram


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


class Part(NamedTuple):
    """Part of one of the objects that hold the samples."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNetwork:
    """How rank 0 of a group connects to those of other groups. Holds no secret: keys are named, or are variables of its functions."""

    listen: str = ""
    """`HOST:PORT`, port 0 for a free one; "": it only connects outwards."""
    endpoint: str = ""
    """Address at which others reach it; "": the one at which it listens."""
    relay: str = ""
    """Address of the rendezvous service, `HOST:PORT` or `tls://HOST:PORT`; "": none."""
    authority: str = ""
    """PEM file of the authority of all groups' certificates; "": connections are not encrypted."""
    certificate: str = ""
    """PEM file of its certificate, in whose names is that of the group."""
    certificate_key: str = ""
    """PEM file of the certificate's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembership:
    """A group of functions that trains one model together with other groups: a region; see `worker.group_exchange`."""

    run: str
    """The run of all groups: prefix of their common keys."""
    store: str
    """Address of the store that all groups reach; empty in the simulator."""
    index: int
    """Place of this group in the order of groups."""
    names: tuple[str, ...]
    """Of all groups, in their order."""
    every: int
    """H: iterations between two exchanges."""
    rounds: int
    """Exchanges before the one at the end of the run."""
    sync: str = "sma"
    """Policy; see `RegionOptions.sync`."""
    compression: str = "none"
    """See `RegionOptions.compression`."""
    network: GroupNetwork | None = None
    """Connections between groups; None: they exchange through the store."""
    iterations: tuple[int, ...] = ()
    """Of all groups, in their order; () in records of earlier releases."""
    joins: bool = False
    """Whether this group joins while the others train."""


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
    sparse: SparseProgram | None = None
    """Sparse model, in place of all these; `sparse.job` drives the run."""
    options: TrainingOptions = field(default_factory=TrainingOptions)
    """How the program is trained."""
    shares_evaluations: bool = False
    """Whether functions merge their evaluations: metrics that are no sums, or decisions that depend on them."""
    deadline_s: float | None = None
    """Longest duration that the user wants."""
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
    test_samples: int = 0
    """Size of the test set."""
    samples_globally: bool = False
    """Whether all functions go through one order of all samples; else each shuffles a share of its own."""
    generation: Generation | None = None
    """Generation whose configuration this is; None: the first one. `RUN/spec` holds the first one."""
    first_workers: int = 0
    """Functions of the first generation, and number of the objects `RUN/test/…`; 0: those of the configuration."""
    parts: tuple[int, ...] = ()
    """Samples in each of the objects `RUN/data/…`, by number; empty: as the ranks of the first generation have them."""
    last_batch: LastBatch = "keep"
    """Treatment of the partial iteration of an epoch."""
    flow: FlowSpec | None = None
    """Flow from which functions read their samples; None: the driver stores their samples in the channel."""
    group: GroupMembership | None = None
    """None: the run is one group."""
    stages: Stages | None = None
    """None: every function holds the whole model."""
    chunk_bytes: int = CHUNK_BYTES
    """Chunk size of the pipelined form, from the store's request times; 0: the plain form is faster."""
    shared_cores: int = 0
    """Cores of the machine on which all functions run; 0: each has its own."""

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
    def servers(self) -> int:
        """Number of its parameter servers. Shards that the client starts are counted as if each had a machine."""
        if self.sparse is not None:
            return 0 if self.sparse.spec.store else self.sparse.spec.shards
        return int(self.configuration.store.startswith(("ps://", "parameter_server")))

    def sampler(self, member: int) -> Positions:
        """Which samples of a rank, or of a replica of stages, belong to an iteration."""
        return (GlobalSampler if self.samples_globally else Sampler)(self.timeline, member, self.seed)

    @property
    def timeline(self) -> Timeline:
        """Epochs and iterations of this generation."""
        g = self.generation
        if g is None:
            return Timeline(split=self.split)
        left = self.samples - g.used_samples
        # What is left may be less than a global batch, of which nothing would be left if it were dropped.
        last = "keep" if left < sum(self.proportions) else self.last_batch
        rest = plan_split(left, self.proportions, last=last) if g.used_samples else None
        return Timeline(split=self.split, first=g.from_iteration, epoch=g.from_epoch, rest=rest)

    @property
    def current_generation(self) -> Generation:
        """The generation whose configuration this is."""
        c = self.configuration
        return self.generation or Generation(
            number=0,
            from_iteration=0,
            from_epoch=0,
            workers=c.workers,
            memory_mb=c.memory_mb,
            aggregators=c.aggregators,
            batch_size=c.batch_size,
            nonaggregator_batch_size=c.nonaggregator_batch_size,
        )

    @property
    def ends_at(self) -> int:
        """Iteration before which this generation ends by the job's schedule."""
        following = self.scheduled
        return self.iterations if following is None else following.from_iteration

    @property
    def planned_iterations(self) -> int:
        """Iterations of the whole run with all changes of the job's schedule, unless it ends early."""
        following = self.scheduled
        return self.iterations if following is None else self.in_generation(following).planned_iterations

    def in_generation(self, generation: Generation) -> RunSpec:
        """The specification as members of a generation read it."""
        configuration = dataclasses.replace(
            self.configuration,
            workers=generation.workers,
            memory_mb=generation.memory_mb,
            aggregators=generation.aggregators,
            batch_size=generation.batch_size,
            nonaggregator_batch_size=generation.nonaggregator_batch_size,
        )
        parts = self.parts or self.split.counts
        workers = self.first_workers or self.configuration.workers
        return dataclasses.replace(self, configuration=configuration, generation=generation, parts=parts, first_workers=workers)

    def resized(self, resize: Resize, from_iteration: int, *, request: str = "") -> Generation:
        """The next generation.

        Args:
            resize: what changes.
            from_iteration: its first iteration.
            request: name of the request.

        Raises:
            JobError: the change contradicts the configuration.
        """
        now, c, timeline = self.current_generation, self.configuration, self.timeline
        values = resized_values(resize, workers=c.workers, aggregators=c.aggregators, pattern=c.pattern)
        return dataclasses.replace(
            now,
            number=now.number + 1,
            from_iteration=from_iteration,
            from_epoch=timeline.epoch_of(from_iteration),
            used_samples=timeline.used_before(from_iteration),
            request=request,
            **values,
        )

    @property
    def scheduled(self) -> Generation | None:
        """The next generation by the job's schedule; None: there is none."""
        epoch = self.current_generation.from_epoch
        entry = next((e for e in self.configuration.resize.schedule if epoch < e.from_epoch < self.epochs), None)
        return None if entry is None else self.resized(entry, self.timeline.start_of(entry.from_epoch))

    def train_parts(self, rank: int) -> list[Part]:
        """Where a rank's training samples are: pieces of the objects `RUN/data/…`."""
        sizes = self.parts or self.split.counts
        if self.samples_globally:
            return _overlap(sizes, 0, self.samples)
        if self.generation is None:
            return [Part(rank, 0, sizes[rank])]
        begin = sum(self.split.counts[:rank])
        return _overlap(sizes, begin, begin + self.split.counts[rank])

    def test_parts(self, rank: int) -> list[Part]:
        """Where a rank's slice of the test set is: pieces of the objects `RUN/test/…`."""
        now = even_sizes(self.test_samples, self.configuration.workers)
        if self.generation is None:
            return [Part(rank, 0, now[rank])]
        begin = sum(now[:rank])
        return _overlap(even_sizes(self.test_samples, self.first_workers or len(now)), begin, begin + now[rank])

    def check_shares(self) -> None:
        """Refuses more functions than there are samples.

        Raises:
            JobError: a rank would have no training samples.
        """
        idle = [rank for rank, n in enumerate(self.split.counts) if n == 0]
        if idle:
            group = self.configuration.group
            raise JobError(
                f"{self.samples} training samples are fewer than {group} functions to share them: rank {idle[0]} would have none",
                remedy=f"use at most {min(self.samples, group - 1)} workers",
            )

    @property
    def proportions(self) -> tuple[int, ...]:
        """Samples of an iteration by rank: a batch for each local step. Ranks share the batches of a script in proportion to them."""
        c = self.configuration
        return tuple(c.batch_of(r) * c.exchange.local_steps for r in range(c.group))

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
        """Iterations of the whole run, unless it ends early or its functions change again."""
        return self.timeline.start_of(self.epochs)

    @property
    def evaluation_interval(self) -> int:
        """Iterations between two evaluations, where epochs are whole."""
        number, unit = self.options.evaluate_every.split(" ")
        return int(number) * (self.split.iterations if unit.startswith("epoch") else 1)

    def evaluates_at(self, iteration: int) -> bool:
        """Whether the model is evaluated before `iteration` is computed, or at the end."""
        number, unit = self.options.evaluate_every.split(" ")
        if not unit.startswith("epoch"):
            due = iteration % int(number) == 0
        else:
            timeline = self.timeline
            due = timeline.starts_epoch(iteration) and timeline.epoch_of(iteration) % int(number) == 0
        return iteration > 0 and (due or iteration == self.iterations)

    def next_evaluation(self, iteration: int) -> int:
        """The first iteration after this one before which the model is evaluated; the last one's end, at most."""
        number, unit = self.options.evaluate_every.split(" ")
        if not unit.startswith("epoch"):
            due = (iteration // int(number) + 1) * int(number)
        else:
            timeline = self.timeline
            epoch = (timeline.epoch_of(iteration) // int(number) + 1) * int(number)
            due = timeline.start_of(min(epoch, self.epochs))
        return min(due, self.iterations)

    @property
    def learning_rate_factor(self) -> float:
        """Factor of learning rates by the linear scaling rule; 1 unless the option is set."""
        c = self.configuration
        return c.global_batch / c.batch_size if self.options.scale_learning_rate else 1.0

    def to_bytes(self) -> bytes:
        return json.dumps(plain(self)).encode()

    @classmethod
    def read(cls, raw: object, *, where: str) -> RunSpec:
        """A specification from JSON, also of an earlier release whose options had other names.

        Raises:
            JobError: not a specification of this release.
        """
        if isinstance(raw, Mapping) and isinstance(raw.get("configuration"), Mapping):
            raw = {**raw, "configuration": with_names_of_today(raw["configuration"])}
        return build(cls, raw, where=where)

    @classmethod
    def from_bytes(cls, data: memoryview | bytes) -> RunSpec:
        """The inverse of `to_bytes`.

        Raises:
            CorruptMessage: not a specification of this release.
        """
        try:
            return cls.read(json.loads(bytes(data)), where="spec")
        except (ValueError, JobError) as e:
            raise CorruptMessage(f"not a run specification of this release: {e}") from None


def even_sizes(total: int, parts: int) -> list[int]:
    """Sizes of a number of parts, alike but for one: the first ones are larger."""
    size, more = divmod(total, parts)
    return [size + (i < more) for i in range(parts)]


def _overlap(sizes: Sequence[int], begin: int, end: int) -> list[Part]:
    """Pieces of consecutive objects of these sizes that hold the samples from `begin` up to `end`; at least one piece."""
    found = [
        Part(number, max(begin - (stop - size), 0), min(end, stop) - (stop - size))
        for number, (size, stop) in enumerate(zip(sizes, accumulate(sizes), strict=True))
        if stop > begin and stop - size < end
    ]
    if found:
        return found
    number = next((i for i, stop in enumerate(accumulate(sizes)) if stop >= begin), 0)
    return [Part(number, 0, 0)]
