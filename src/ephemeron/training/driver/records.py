"""What a training run adds to its header in `run.json`, and `result.json`: how it ended, as typed values."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.events import Phase, Traffic
from ephemeron.runs.cost import RegionSummary
from ephemeron.runs.folders import RESULT_FILE, RUN_FILE, RunFolder
from ephemeron.runs.header import RunHeader
from ephemeron.runs.origin import command_line, commit_of
from ephemeron.runs.summary import RunSummary
from ephemeron.training.worker.spec import RunSpec


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
class GenerationSummary:
    """Functions of a run from an iteration on."""

    from_iteration: int
    workers: int
    memory_mb: int


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
class ResultSummary(RunSummary):
    """`result.json` of a training run, which `--json` prints: how it ended, what it did and what that costs."""

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
    metrics: Mapping[str, float | None]
    """Metrics of the evaluation data by name: `loss`, and what the program reports. None where there is no such number."""
    traffic: RunTraffic
    weights_sha256: str | None
    phases_s: Mapping[Phase, float]
    """Seconds by phase, summed over all functions."""
    local_steps: int = 1
    """Batches of a function between two exchanges."""
    best_iteration: int | None = None
    """Iterations before the best evaluation, where its weights are kept."""
    generations: tuple[GenerationSummary, ...] = ()
    """Functions of the run from the first iteration on, and after each change."""
    regions: tuple[RegionSummary, ...] = ()
    """Empty: all functions are in one place."""
    step_us: Mapping[Phase, float] = field(default_factory=dict)
    """Of a sparse job, mean microseconds of a function's step by phase: `load` the minibatch, `download` rows, `compute`, `upload`
    gradients, `wait` for acknowledgements."""


def new_header(
    spec: RunSpec,
    folder: RunFolder,
    *,
    source: CodeSource | None,
    settings: Mapping[str, object],
    parent: str = "",
    labels: Mapping[str, str],
    code: Sequence[Path] = (),
) -> RunHeader:
    """The header of a run that is about to be launched.

    Args:
        spec, folder: of the run.
        source: None: the run cannot get new code.
        settings: of its cloud.
        parent: run of which this is a part.
        labels: see `runs.labels`.
        code: folders of the user's code.
    """
    c = spec.configuration
    return RunHeader(
        run_id=spec.run_id,
        kind="training" if spec.sparse is None else "sparse",
        name=spec.name,
        platform=c.platform,
        channel=folder.objects.resolve().as_uri() if c.store == "folder" else c.store,
        functions=c.workers,
        memory_mb=c.memory_mb,
        lifetime_s=c.function_timeout_s,
        servers=spec.servers,
        prices=spec.prices,
        budget_usd=spec.budget_usd,
        deadline_s=spec.deadline_s,
        started_at=time.time(),
        parent=parent,
        labels=labels,
        command=command_line(),
        commit=next(filter(None, map(commit_of, code)), ""),
        settings=settings,
        payload={"spec": json.loads(spec.to_bytes()), "source": None if source is None else plain(source)},
    )


def run_spec(header: RunHeader) -> RunSpec:
    """Specification of a training run.

    Raises:
        JobError: it is of another release, or no training run.
    """
    if "spec" not in header.payload:
        raise JobError(f"run {header.run_id} is of kind {header.kind}, and has no specification of a training run")
    return RunSpec.read(header.payload["spec"], where=f"{RUN_FILE} of {header.run_id}: spec")


def code_source(header: RunHeader) -> CodeSource | None:
    """Where the code of a training run comes from; None: it cannot get new code."""
    source = header.payload.get("source")
    return None if source is None else build(CodeSource, source, where=f"{RUN_FILE} of {header.run_id}: source")


def read_result(folder: RunFolder) -> ResultSummary | None:
    """A run's result; None where there is none that can be read."""
    raw = folder.read(RESULT_FILE)
    try:
        return None if raw is None else build(ResultSummary, _with_one_list(raw), where=RESULT_FILE)
    except JobError:
        return None


def _with_one_list(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A result whose regions are in one list; earlier releases had a second one, `groups`, with what their functions did."""
    others = {each["name"]: each for each in raw.get("groups") or ()}
    regions = [{**others.get(each["name"], {}), **each} for each in raw.get("regions") or ()]
    return {**{name: value for name, value in raw.items() if name != "groups"}, "regions": regions}
