"""What every function of a run reads first: one JSON object, `RUN/spec`, without secrets and without code."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from ephemeron.data import SampleSplit, plan_split
from ephemeron.data.flow_spec import FlowSpec
from ephemeron.data.split import LastBatch
from ephemeron.errors import CorruptMessage
from ephemeron.training.collectives.chunking import CHUNK_BYTES
from ephemeron.training.job import Configuration, Target
from ephemeron.training.planner.prices import Prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A model that lies on several functions. Rank = stage · replicas + replica."""

    replicas: int
    """R."""
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
        """S."""
        return len(self.fed)

    def place(self, rank: int) -> tuple[int, int]:
        """Stage and replica of a rank."""
        return divmod(rank, self.replicas)

    def rank(self, stage: int, replica: int) -> int:
        """The inverse of `place`."""
        return stage * self.replicas + replica


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run as its workers see it."""

    run_id: str
    name: str = ""
    """Of the job."""
    model: Target
    loss: Target
    optimizer: Target
    configuration: Configuration
    epochs: int
    seed: int
    dtype: str
    samples: int
    """In the training set."""
    prices: Prices
    budget_usd: float | None = None
    faults: tuple[str, ...] = ()
    peer_timeout_s: float = 20.0
    """Shortest wait before a peer is suspected; slow iterations make it longer."""
    cold_start_s: float = 3.0
    """How long before its end a function starts its successor."""
    trainer: str = "torch"
    """`torch`; `synthetic` or `counting` for studies in which gradients do not matter."""
    trainer_options: dict[str, Any] = field(default_factory=dict)
    last_batch: LastBatch = "keep"
    """What becomes of the partial iteration of an epoch."""
    flow: FlowSpec | None = None
    """Where functions read their samples; None: they get them."""
    stages: Stages | None = None
    """None: every function holds the whole model."""
    chunk_bytes: int = CHUNK_BYTES
    """Of the pipelined form, from what requests take at the store; 0: the plain form is faster."""

    @property
    def split(self) -> SampleSplit:
        """Which rank, or replica, owns how many samples."""
        c = self.configuration
        return plan_split(self.samples, [c.batch_of(r) for r in range(c.group)], last=self.last_batch)

    def member(self, rank: int) -> int:
        """Number of a rank among those that share the batch: the rank itself, or its replica of the pipeline."""
        return rank if self.stages is None else self.stages.place(rank)[1]

    @property
    def most_replacements(self) -> int:
        """Functions that may be replaced in the run."""
        c = self.configuration
        return c.max_replacements or max(100, 20 * c.workers)

    @property
    def iterations(self) -> int:
        """In the whole run."""
        return self.split.iterations * self.epochs

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: memoryview | bytes) -> RunSpec:
        """The inverse of `to_bytes`.

        Raises:
            CorruptMessage: not a specification of this release.
        """
        try:
            raw = json.loads(bytes(data))
            for name in ("model", "loss", "optimizer"):
                raw[name] = Target(**raw[name])
            raw["configuration"] = Configuration(**raw["configuration"])
            raw["prices"] = Prices(**raw["prices"])
            raw["faults"] = tuple(raw["faults"])
            raw["flow"] = None if raw["flow"] is None else FlowSpec.from_json(raw["flow"])
            if raw["stages"] is not None:
                told: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw["stages"].items()}
                raw["stages"] = Stages(**told)
            return cls(**raw)
        except (ValueError, KeyError, TypeError) as e:
            raise CorruptMessage(f"not a run specification of this release: {e}") from None
