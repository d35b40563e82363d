"""What leader and stage processes say to each other, as words and buffers. Pure; no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from ephemeron.errors import JobError, StageFailed
from ephemeron.partition.runtime.backend import DeviceState, StepResult
from ephemeron.partition.runtime.device import MicroBatchInput, StageMessage
from ephemeron.partition.runtime.dispatcher import Operation
from ephemeron.partition.runtime.execution import MicroBatchLoss
from ephemeron.partition.runtime.wire import packed, unpacked
from ephemeron.partition.schedule_simulator.replay import ReplaySpan

Letter = tuple[dict[str, Any], list[memoryview]]


def of_parcel(parcel: StageMessage) -> Letter:
    """A parcel, ready to leave."""
    said, buffers = packed(parcel.values)
    return {
        **said, "iteration": parcel.iteration, "source": parcel.source, "target": parcel.target,
        "direction": parcel.direction, "micro_batch": parcel.micro_batch,
    }, buffers  # fmt: skip


def parcel_of(said: Mapping[str, Any], buffers: Sequence[Any]) -> StageMessage:
    """As it was sent."""
    return StageMessage(
        iteration=said["iteration"],
        source=said["source"],
        target=said["target"],
        direction=said["direction"],
        micro_batch=said["micro_batch"],
        values=unpacked(said, buffers),
    )


def of_feed(feed: MicroBatchInput) -> Letter:
    """A micro-batch's inputs and targets.

    Raises:
        JobError: inputs or targets that are neither tensors nor plain values, or are nested in classes that are not
            known.
    """
    leaves, spec = tree_flatten(feed.targets)
    try:
        nesting = treespec_dumps(spec)
    except (NotImplementedError, ValueError, TypeError) as e:
        raise JobError(f"targets cannot travel between processes: {e}", remedy="nest tensors in lists and dicts") from e
    said, buffers = packed(
        {f"v {n}": v for n, v in feed.values.items()} | {f"t target {i}": v for i, v in enumerate(leaves)}
    )
    return {
        **said, "iteration": feed.iteration, "micro_batch": feed.micro_batch, "weight": feed.weight, "nesting": nesting,
    }, buffers  # fmt: skip


def feed_of(said: Mapping[str, Any], buffers: Sequence[Any]) -> MicroBatchInput:
    """As it was sent."""
    values = unpacked(said, buffers)
    return MicroBatchInput(
        iteration=said["iteration"],
        micro_batch=said["micro_batch"],
        values={n[2:]: v for n, v in values.items() if n.startswith("v ")},
        targets=tree_unflatten([v for n, v in values.items() if n.startswith("t ")], treespec_loads(said["nesting"])),
        weight=said["weight"],
    )


def of_done(done: StepResult, *, results: bool) -> Letter:
    """What a device has done."""
    values = {f"{m} {n}": v for m, s in done.scored.items() for n, v in s.results.items()} if results else {}
    said, buffers = packed(values)
    return {
        **said,
        "scored": [[m, s.loss, dict(s.metrics)] for m, s in done.scored.items()],
        "spans": [[s.resource, s.what, s.direction, s.micro_batch, s.start_s, s.end_s] for s in done.spans],
    }, buffers


def done_of(said: Mapping[str, Any], buffers: Sequence[Any]) -> StepResult:
    """As it was sent."""
    results: dict[int, dict[str, Any]] = {}
    for key, value in unpacked(said, buffers).items():
        m, _, name = key.partition(" ")
        results.setdefault(int(m), {})[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return StepResult(
        scored={m: MicroBatchLoss(loss=x, metrics=k, results=results.get(m, {})) for m, x, k in said["scored"]},
        spans=[
            ReplaySpan(
                resource=r if isinstance(r, str) else (r[0], r[1]),
                what=what,
                direction=direction,
                micro_batch=m,
                start_s=start_s,
                end_s=end_s,
            )
            for r, what, direction, m, start_s, end_s in said["spans"]
        ],
    )


def of_state(state: DeviceState) -> Letter:
    """What a device holds."""
    values: dict[str, Any] = {json.dumps([i, n]): t for i, s in state.stages.items() for n, t in s.items()}
    values |= {json.dumps([p, k]): v for p, s in state.optimizer.items() for k, v in s.items()}
    said, buffers = packed(values)
    return {**said, "options": dict(state.options)}, buffers


def state_of_letter(said: Mapping[str, Any], buffers: Sequence[Any]) -> DeviceState:
    """As it was sent."""
    stages: dict[int, dict[str, torch.Tensor]] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for key, value in unpacked(said, buffers).items():
        where, name = json.loads(key)
        if isinstance(where, int):
            stages.setdefault(where, {})[name] = value
        else:
            optimizer.setdefault(where, {})[name] = value
    return DeviceState(stages=stages, optimizer=optimizer, options=said["options"])


def of_failure(e: StageFailed) -> dict[str, Any]:
    """A failure as words."""
    o = e.operation
    return {
        "message": e.message, "device": e.device, "iteration": e.iteration, "operator": e.operator,
        "operation": None if o is None else [o.stage, o.direction, o.micro_batch],
    }  # fmt: skip


def failure_of(said: Mapping[str, Any]) -> StageFailed:
    """As it was raised."""
    o = said["operation"]
    return StageFailed(
        said["message"],
        device=said["device"],
        iteration=said["iteration"],
        operation=None if o is None else Operation(stage=o[0], direction=o[1], micro_batch=o[2]),
        operator=said["operator"],
    )
