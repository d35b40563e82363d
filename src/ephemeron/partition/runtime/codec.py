"""Messages between leader and stage processes: a typed header for RPC and raw buffers. Pure; no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, StageFailed
from ephemeron.partition.runtime.backend import DeviceState, StepResult
from ephemeron.partition.runtime.device import MicroBatchInput, StageMessage
from ephemeron.partition.runtime.dispatcher import Operation
from ephemeron.partition.runtime.execution import MicroBatchLoss
from ephemeron.partition.schedule_simulator.schedule import Pass, ReplaySpan

BoundaryValue: TypeAlias = torch.Tensor | bool | int | float | str | None
"""A value that may cross from stage to stage."""
ValueRow: TypeAlias = tuple[str, str, tuple[int, ...]] | tuple[str, bool | int | float | str | None]
"""Name, dtype and shape of a tensor, whose bytes are the next buffer (none if it is empty); or name and plain value."""
_DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}


def encode_values(values: Mapping[str, object]) -> tuple[tuple[ValueRow, ...], list[memoryview]]:
    """Table and buffers of values. Buffers are views of contiguous tensors, and copies of others.

    Raises:
        JobError: a value is neither a dense tensor nor a plain number, text or None; names it.
    """
    rows: list[ValueRow] = []
    buffers: list[memoryview] = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise JobError(f"{name} is a sparse tensor, which cannot be serialised", remedy="use dense gradients")
            rows.append((name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
            if value.numel():
                flat = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
                buffers.append(flat.view(torch.uint8).numpy().data)
        elif value is None or isinstance(value, (bool, int, float, str)):
            rows.append((name, value))
        else:
            raise JobError(
                f"{name} is {type(value).__name__}, which cannot be sent between processes",
                remedy="put the operators that make and read it on one device",
            )
    return tuple(rows), buffers


def decode_values(rows: Sequence[ValueRow], buffers: Sequence[memoryview | bytearray]) -> dict[str, BoundaryValue]:
    """Values by name; tensors share the memory of the buffers."""
    values: dict[str, BoundaryValue] = {}
    following = iter(buffers)
    for row in rows:
        if len(row) == 2:
            values[row[0]] = row[1]
            continue
        name, dtype, shape = row
        if any(n == 0 for n in shape):
            values[name] = torch.empty(shape, dtype=_DTYPES[dtype])
        else:
            values[name] = torch.frombuffer(next(following), dtype=_DTYPES[dtype]).reshape(shape)
    return values


def decode_tensors(rows: Sequence[ValueRow], buffers: Sequence[memoryview | bytearray]) -> dict[str, torch.Tensor]:
    """Values that are all tensors, e.g. gradients.

    Raises:
        TypeError: one is not.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, value in decode_values(rows, buffers).items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is no tensor")
        tensors[name] = value
    return tensors


Header: TypeAlias = Mapping[str, object]
Buffers: TypeAlias = Sequence[memoryview | bytearray]
Message: TypeAlias = tuple[dict[str, object], list[memoryview]]
"""Header and buffers of an RPC call or reply."""


_SpanRow: TypeAlias = tuple[str | tuple[str, str], str, Pass, int, float, float]
"""Fields of a `ReplaySpan` in order; rows are read faster than dataclasses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """Call `step`."""

    iteration: int
    micro_batches: int
    results: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersRequest:
    """Call `connect`: addresses of the other stage processes."""

    peers: Mapping[str, tuple[str, int]]
    """Host and port, or path and 0, by device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGradients:
    """Gradients of shared parameters from another device."""

    iteration: int
    device: str
    gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoss:
    """A device could not send to another one."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _ActivationHeader:
    values: tuple[ValueRow, ...]
    iteration: int
    source: int
    target: int
    direction: Pass
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _InputHeader:
    values: tuple[ValueRow, ...]
    iteration: int
    micro_batch: int
    weight: float
    nesting: str
    """Nesting of the targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GradientsHeader:
    values: tuple[ValueRow, ...]
    iteration: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    """Loss and metrics of a micro-batch; not finite where training diverges, so they are no checked numbers."""

    micro_batch: int
    loss: object
    metrics: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResultHeader:
    values: tuple[ValueRow, ...]
    scored: tuple[_Scored, ...]
    spans: tuple[_SpanRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateHeader:
    values: tuple[ValueRow, ...]
    options: Mapping[str, dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    message: str
    device: str
    iteration: int
    operator: str
    operation: tuple[int, Pass, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    problem: str
    remedy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Body of a reply that is no result: one of three."""

    failed: _Failure | None = None
    refused: _Refusal | None = None
    lost: str | None = None


def encode_activation(message: StageMessage) -> Message:
    """Activations or gradients for another stage."""
    rows, buffers = encode_values(message.values)
    header = _ActivationHeader(
        values=rows,
        iteration=message.iteration,
        source=message.source,
        target=message.target,
        direction=message.direction,
        micro_batch=message.micro_batch,
    )
    return plain(header), buffers


def decode_activation(header: Header, buffers: Buffers) -> StageMessage:
    """The inverse of `encode_activation`."""
    read = build(_ActivationHeader, header, where="activation")
    return StageMessage(
        iteration=read.iteration,
        source=read.source,
        target=read.target,
        direction=read.direction,
        micro_batch=read.micro_batch,
        values=decode_values(read.values, buffers),
    )


def encode_input(given: MicroBatchInput) -> Message:
    """A micro-batch's inputs and targets.

    Raises:
        JobError: inputs or targets that are neither tensors nor plain values, or are nested in classes that are not
            known.
    """
    leaves, spec = tree_flatten(given.targets)
    try:
        nesting = treespec_dumps(spec)
    except (NotImplementedError, ValueError, TypeError) as e:
        raise JobError(f"targets cannot be sent between processes: {e}", remedy="nest tensors in lists and dicts") from e
    named = {f"v {n}": v for n, v in given.values.items()} | {f"t target {i}": v for i, v in enumerate(leaves)}
    rows, buffers = encode_values(named)
    header = _InputHeader(values=rows, iteration=given.iteration, micro_batch=given.micro_batch, weight=given.weight, nesting=nesting)
    return plain(header), buffers


def decode_input(header: Header, buffers: Buffers) -> MicroBatchInput:
    """The inverse of `encode_input`."""
    read = build(_InputHeader, header, where="input")
    values = decode_values(read.values, buffers)
    targets = [v for n, v in values.items() if n.startswith("t ")]
    return MicroBatchInput(
        iteration=read.iteration,
        micro_batch=read.micro_batch,
        values={n[2:]: v for n, v in values.items() if n.startswith("v ")},
        targets=tree_unflatten(targets, treespec_loads(read.nesting)),
        weight=read.weight,
    )


def encode_gradients(shared: SharedGradients) -> Message:
    """Gradients of shared parameters for another device."""
    rows, buffers = encode_values(shared.gradients)
    return plain(_GradientsHeader(values=rows, iteration=shared.iteration, device=shared.device)), buffers


def decode_gradients(header: Header, buffers: Buffers) -> SharedGradients:
    """The inverse of `encode_gradients`."""
    read = build(_GradientsHeader, header, where="shared gradients")
    return SharedGradients(iteration=read.iteration, device=read.device, gradients=decode_tensors(read.values, buffers))


def encode_result(result: StepResult, *, results: bool) -> Message:
    """Result of a device's iteration.

    Args:
        result: of the device.
        results: whether values of the model's result are included.
    """
    values = {f"{m} {n}": v for m, s in result.scored.items() for n, v in s.results.items()} if results else {}
    rows, buffers = encode_values(values)
    header = _ResultHeader(
        values=rows,
        scored=tuple(_Scored(micro_batch=m, loss=s.loss, metrics=s.metrics) for m, s in result.scored.items()),
        spans=tuple((s.resource, s.what, s.direction, s.micro_batch, s.start_s, s.end_s) for s in result.spans),
    )
    return plain(header), buffers


def decode_result(header: Header, buffers: Buffers) -> StepResult:
    """The inverse of `encode_result`."""
    read = build(_ResultHeader, header, where="result of a step")
    results: dict[int, dict[str, BoundaryValue]] = {}
    for key, value in decode_values(read.values, buffers).items():
        m, _, name = key.partition(" ")
        results.setdefault(int(m), {})[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return StepResult(
        scored={
            s.micro_batch: MicroBatchLoss(
                loss=_number(s.loss), metrics={n: _number(v) for n, v in s.metrics.items()}, results=results.get(s.micro_batch, {})
            )
            for s in read.scored
        },
        spans=[
            ReplaySpan(resource=resource, what=what, direction=direction, micro_batch=m, start_s=start_s, end_s=end_s)
            for resource, what, direction, m, start_s, end_s in read.spans
        ],
    )


def encode_state(state: DeviceState) -> Message:
    """Parameters, buffers and optimiser of a device."""
    values: dict[str, object] = {json.dumps([i, n]): t for i, s in state.stages.items() for n, t in s.items()}
    values |= {json.dumps([p, k]): v for p, s in state.optimizer.items() for k, v in s.items()}
    rows, buffers = encode_values(values)
    return plain(_StateHeader(values=rows, options={n: dict(o) for n, o in state.options.items()})), buffers


def decode_state(header: Header, buffers: Buffers) -> DeviceState:
    """The inverse of `encode_state`."""
    read = build(_StateHeader, header, where="state of a device")
    stages: dict[int, dict[str, torch.Tensor]] = {}
    optimizer: dict[str, dict[str, object]] = {}
    for key, value in decode_values(read.values, buffers).items():
        where, name = json.loads(key)
        if not isinstance(where, int):
            optimizer.setdefault(where, {})[name] = value
        elif isinstance(value, torch.Tensor):
            stages.setdefault(where, {})[name] = value
    return DeviceState(stages=stages, optimizer=optimizer, options=read.options)


def encode_problem(e: StageFailed | JobError | PeerLoss) -> Message:
    """Reply of a call that failed."""
    if isinstance(e, PeerLoss):
        problem = _Problem(lost=e.message)
    elif isinstance(e, JobError):
        problem = _Problem(refused=_Refusal(problem=e.problem, remedy=e.remedy))
    else:
        o = e.operation
        direction: Pass = "backward" if o is not None and o.direction == "backward" else "forward"
        operation = None if o is None else (o.stage, direction, o.micro_batch)
        problem = _Problem(
            failed=_Failure(message=e.message, device=e.device, iteration=e.iteration, operator=e.operator, operation=operation)
        )
    return {"problem": plain(problem)}, []


def decode_problem(header: Header) -> StageFailed | JobError | ConnectionError | None:
    """Exception of a call that failed; None: the reply is a result."""
    if "problem" not in header:
        return None
    read = build(_Problem, header["problem"], where="problem")
    if read.failed is not None:
        f, o = read.failed, read.failed.operation
        return StageFailed(
            f.message,
            device=f.device,
            iteration=f.iteration,
            operation=None if o is None else Operation(stage=o[0], direction=o[1], micro_batch=o[2]),
            operator=f.operator,
        )
    if read.refused is not None:
        return JobError(read.refused.problem, remedy=read.refused.remedy)
    return ConnectionError(read.lost)


def _number(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)
