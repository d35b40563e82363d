"""Documents of a run's folder: `run.json` (what was launched, and where) and `result.json` (how it ended), as typed values.

A record of another release may not be readable. It is then treated as absent where runs are listed, and refused by name
where a run is to be attached to or resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.events import Phase, Traffic
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.worker.spec import RunSpec

RUN_FILE, RESULT_FILE = "run.json", "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """A parameter or buffer, as far as checkpoints depend on it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype}{'' if self.trained else ', not trained'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeSource:
    """Folders and patterns of a run's code, and the layout of its model: enough to bundle the code again on resume."""

    folders: tuple[Path, ...]
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    apart: tuple[Path, ...]
    """Files and folders that are sent in another way, such as training samples."""
    closed: tuple[Path, ...]
    """Folders of which nothing is sent."""
    layout: tuple[TensorLayout, ...]
    """Parameters and buffers in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """`run.json`: everything that attaching to a run and resuming it need. No secrets."""

    run_id: str
    platform: str
    job: str = ""
    """Name of the job."""
    workers: int = 0
    address: str = ""
    """Address of the channel."""
    wall_time: float = 0.0
    """Unix time of the run's t = 0."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of the cloud; empty on other platforms."""
    source: CodeSource | None = None
    """None: the run cannot get new code."""
    spec: Mapping[str, object] = field(default_factory=dict)
    """The run's specification, see `run_spec`."""

    def run_spec(self) -> RunSpec:
        """The run's specification.

        Raises:
            JobError: it is of another release.
        """
        return build(RunSpec, self.spec, where=f"{RUN_FILE} of {self.run_id}: spec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Billed quantities."""

    gb_seconds: float
    requests: int
    """Invocations."""
    storage_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    """Functions of a run from an iteration on."""

    from_iteration: int
    workers: int
    memory_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """A group of functions in the result of its run."""

    name: str
    platform: str
    workers: int
    memory_mb: int
    samples: int
    """Of the training set."""
    iterations: int
    invocations: int
    gb_seconds: float
    cost_usd: float
    prices: str
    """Name and date of its price list."""
    released_s: float = 0.0
    """Time of its functions together that was not billed, as they had ended until the last exchange with other groups was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSummary:
    """A group of functions as a region that exchanges with others."""

    name: str
    iterations: int
    waiting_share: float
    """Part of its time that the region has spent in exchanges: sending, and waiting for other regions."""
    wan_bytes_sent: int
    """To all other regions together, as metered by the region."""
    wan_bytes_received: int
    cost_usd: float
    wan_kernel_bytes_sent: int = 0
    """The same over TCP, as the kernel has counted; 0 where regions have no connections, and in results of earlier releases."""
    wan_kernel_bytes_received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTraffic(Traffic):
    """Traffic of a whole run, with the number of its requests."""

    store_requests: int = 0
    """Puts, gets, polls, deletes and lists together; 0 in results of earlier releases."""

    @classmethod
    def of(cls, traffic: Traffic) -> RunTraffic:
        """The same traffic, counted."""
        counters = {f.name: getattr(traffic, f.name) for f in fields(Traffic)}
        return cls(**counters, store_requests=traffic.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSummary:
    """`result.json`, which `--json` prints: how a run ended, what it did and what that costs."""

    run_id: str
    status: str
    """`finished`, `stopped` or `failed`."""
    seconds: float
    cost_usd: float
    workers: int
    aggregators: int
    memory_mb: int
    batch_size_aggregator: int
    batch_size_nonaggregator: int
    stages: int
    replicas: int
    micro_batches: int
    schedule: str | None
    pattern: str
    sync: str
    channel: str
    exchange: str
    compression: str
    iterations: int
    invocations: int
    metrics: Mapping[str, float | None]
    """Metrics of the evaluation data by name: `loss`, and what the program reports. None where there is no such number."""
    traffic: RunTraffic
    billed: Bill
    weights_sha256: str | None
    phases_s: Mapping[Phase, float]
    """Seconds by phase, summed over all functions."""
    platform: str
    budget_usd: float | None
    prices: str
    """Name and date of the price list."""
    local_steps: int = 1
    """Batches of a function between two exchanges."""
    causes: tuple[str, ...] = ()
    """Why it has failed, or which limit has stopped it."""
    best_iteration: int | None = None
    """Iterations before the best evaluation, where its weights are kept."""
    generations: tuple[GenerationSummary, ...] = ()
    """Functions of the run from the first iteration on, and after each change."""
    groups: tuple[GroupSummary, ...] = ()
    """Groups of functions; empty: all are one group."""
    regions: tuple[RegionSummary, ...] = ()
    """The same groups as regions: what they have exchanged with each other."""
    step_us: Mapping[Phase, float] = field(default_factory=dict)
    """Of a sparse job, mean microseconds of a function's step by phase: `load` the minibatch, `download` rows, `compute`, `upload`
    gradients, `wait` for acknowledgements."""


def new_record(spec: RunSpec, folder: RunFolder, *, source: CodeSource | None, settings: Mapping[str, object]) -> RunRecord:
    """The record of a run that is about to be launched."""
    c = spec.configuration
    return RunRecord(
        run_id=spec.run_id,
        platform=c.platform,
        job=spec.name,
        workers=c.workers,
        settings=settings,
        source=source,
        address=folder.objects.resolve().as_uri() if c.store == "folder" else c.store,
        wall_time=time.time(),
        spec=json.loads(spec.to_bytes()),
    )


D = TypeVar("D", RunRecord, ResultSummary)


def write(folder: RunFolder, document: RunRecord | ResultSummary) -> None:
    """Replaces a document as a whole."""
    folder.write(RUN_FILE if isinstance(document, RunRecord) else RESULT_FILE, plain(document))


def read_record(folder: RunFolder) -> RunRecord | None:
    """A run's record; None where there is none that can be read."""
    return _read(RunRecord, folder, RUN_FILE)


def read_result(folder: RunFolder) -> ResultSummary | None:
    """A run's result; None where there is none that can be read."""
    return _read(ResultSummary, folder, RESULT_FILE)


def _read(cls: type[D], folder: RunFolder, name: str) -> D | None:
    raw = folder.read(name)
    try:
        return None if raw is None else build(cls, raw, where=name)
    except JobError:
        return None
