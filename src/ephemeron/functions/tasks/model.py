"""Tasks, leases and results as values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ephemeron.errors import JobError

ResultStatus: TypeAlias = Literal["ok", "failed", "dead", "cancelled"]
FINAL: frozenset[ResultStatus] = frozenset({"ok", "dead", "cancelled"})
"""States that a reader sees. `failed` is a try after which the task is tried again."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def check_name(name: str, *, what: str) -> None:
    """Raises `JobError` unless the name can be a part of a key."""
    if _NAME.fullmatch(name) is None:
        raise JobError(f"{what} {name[:80]!r} is no name", remedy="use letters, digits, dots, dashes and underscores")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task: small plain data. Large values are objects of the channel and are named by their keys."""

    id: str
    """Unique in its queue; `[A-Za-z0-9._-]+`."""
    function: str
    """What the executor's resolver understands: `module:function`, or a reference to shipped code."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """JSON."""
    payload: bytes = b""
    """Small binary argument, stored with the task; its meaning is the resolver's."""
    inputs: tuple[str, ...] = ()
    """Keys of objects that are fetched before the task runs, while others compute."""
    output: str = ""
    """Key under which the result is stored, create-only; empty: small results are stored inline, others under a key of the queue."""
    timeout_s: float | None = None
    """Time limit of one try; None: the rest of the executor's lifetime."""
    max_tries: int = 3
    """Failed tries after which the task is dead."""
    then: tuple[str, ...] = ()
    """Edges that count this task's success."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEdge:
    """Tasks that run when all their inputs are there."""

    name: str
    """Unique in its queue; `[A-Za-z0-9._-]+`."""
    inputs: int
    """Number of tasks that name this edge in `then`. If one of them dies, the edge's tasks die, too."""
    tasks: tuple[TaskSpec, ...]
    order: int = 0
    """As in `TaskQueue.publish`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """End of a try of a task."""

    id: str
    status: ResultStatus = "ok"
    value: object = None
    """JSON value that the function returned; None if it returned bytes."""
    data: bytes | None = None
    """Bytes that the function returned, if they are small; of a failed task, the exception as its resolver has encoded it."""
    ref: str = ""
    """Key of the object that holds the result; empty: the result is in `value` or `data`."""
    ref_is_json: bool = False
    """The object holds a JSON value; else the bytes that the function returned."""
    error: str = ""
    """One line."""
    traceback: str = ""
    """Of the task's own code."""
    tries: int = 1
    """This one included."""
    compute_s: float = 0.0
    executor: str = ""
    """Owner that recorded it."""
    lost: str = ""
    """Owner that vanished with it in this try; empty: none did."""

    @property
    def is_final(self) -> bool:
        """Whether the task will not be tried again."""
        return self.status in FINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLease:
    """Right of one owner to work on a batch, until it stops renewing it."""

    batch: str
    attempt: int
    """1, and one more for each lease of this batch that expired in a row."""
    tasks: tuple[TaskSpec, ...]
    """Those that have no final result yet, in order."""

    @property
    def is_careful(self) -> bool:
        """Whether each result should be recorded before the next task begins: an earlier executor vanished with this batch, and the
        task that kills executors is found as the first one without a result."""
        return self.attempt > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingEdges:
    """What could be released by one more result."""

    edges: tuple[str, ...] = ()
    """Names, of those asked for."""
    ready_order: int | None = None
    """Order of the first batch that is ready; None: none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """What is in a queue now."""

    ready: int
    """Tasks that may be taken. Tasks of a batch with some results count until the batch is complete."""
    leased: int
    """Tasks of batches under a lease that has not expired, as far as this observer knows."""
    executors: frozenset[str] = frozenset()
    """Names that are announced and have renewed their announcement lately."""
    closed: bool = False
    """No task will be published any more."""

    @property
    def tasks(self) -> int:
        """Ready and leased ones."""
        return self.ready + self.leased


def number_of(executor: str) -> int | None:
    """Number in the name of an executor; None: it was not started by a provisioner."""
    head = executor.partition("-")[0]
    return int(head) if head.isdigit() else None
