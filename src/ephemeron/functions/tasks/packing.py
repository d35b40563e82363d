"""Tasks and results as bytes: a JSON header with defaults left out, then the binary values, one after the other.

Read back as dataclasses (`config.typed`), so that a damaged or foreign object is one line of error and no surprise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ephemeron.config.typed import build
from ephemeron.errors import CorruptMessage, JobError
from ephemeron.functions.tasks.model import TaskEdge, TaskResult, TaskSpec, check_name

T = TypeVar("T", TaskSpec, TaskResult)

_LENGTH = struct.Struct("<I")
_BINARY = {TaskSpec: "payload", TaskResult: "data"}
"""The field of each that is bytes; the header has its length."""


def pack(items: Sequence[T], **more: object) -> bytes:
    """Tasks or results as one object.

    Raises:
        JobError: a value is no JSON.
    """
    rows: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for item in items:
        row = _row(item)
        name = _BINARY[type(item)]
        if name in row:
            blob = row[name]
            row[name] = len(blob)
            blobs.append(blob)
        rows.append(row)
    try:
        header = json.dumps({"rows": rows, **more}, separators=(",", ":")).encode()
    except (TypeError, ValueError) as e:
        raise JobError(f"tasks and results are JSON, or bytes: {e}") from e
    return b"".join([_LENGTH.pack(len(header)), header, *blobs])


def unpack(kind: type[T], data: memoryview | bytes, *, key: str) -> tuple[list[T], Mapping[str, Any]]:
    """The inverse of `pack`: the items, and what else the header says.

    Raises:
        CorruptMessage: no such object.
    """
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        at = _LENGTH.size + length
        header = json.loads(bytes(view[_LENGTH.size : at]))
        name, items = _BINARY[kind], []
        for row in header.pop("rows"):
            if name in row:
                end = at + int(row[name])
                row[name] = bytes(view[at:end])
                at = end
            items.append(build(kind, row, where=kind.__name__))
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, JobError) as e:
        raise CorruptMessage(f"no batch of {kind.__name__}: {e}", key=key) from e
    return items, header


def batch_name(tasks: Sequence[TaskSpec], order: int) -> tuple[str, bytes]:
    """Name of a batch by its content, `ORDER-DIGEST-COUNT`, and its bytes.

    Raises:
        JobError: no task, two of one id, or an id that is no name.
    """
    if not tasks:
        raise JobError("a batch of no tasks", remedy="publish at least one")
    if not 0 <= order < 10**8:
        raise JobError(f"order = {order} should be from 0 to 99999999")
    if len({task.id for task in tasks}) < len(tasks):
        raise JobError("two tasks of one batch have the same id")
    for task in tasks:
        check_name(task.id, what="the task id")
        for edge in task.then:
            check_name(edge, what="the edge")
    data = pack(tasks)
    return f"{order:08d}-{hashlib.blake2b(data, digest_size=10).hexdigest()}-{len(tasks)}", data


def pack_edge(edge: TaskEdge) -> bytes:
    """An edge as one object.

    Raises:
        JobError: as `batch_name`, or it has no inputs.
    """
    check_name(edge.name, what="the edge")
    if edge.inputs < 1:
        raise JobError(f"edge {edge.name} has {edge.inputs} inputs", remedy="publish its tasks instead")
    batch_name(edge.tasks, edge.order)
    return pack(edge.tasks, name=edge.name, inputs=edge.inputs, order=edge.order)


def unpack_edge(data: memoryview | bytes, *, key: str) -> TaskEdge:
    """The inverse of `pack_edge`.

    Raises:
        CorruptMessage: no edge.
    """
    tasks, header = unpack(TaskSpec, data, key=key)
    try:
        return build(TaskEdge, {**header, "tasks": tuple(tasks)}, where="edge")
    except JobError as e:
        raise CorruptMessage(f"no edge: {e}", key=key) from e


_DEFAULTS: dict[type, list[tuple[str, object]]] = {}


def _row(item: Any) -> dict[str, Any]:
    """Fields that differ from their default."""
    kind = type(item)
    known = _DEFAULTS.get(kind)
    if known is None:
        known = _DEFAULTS[kind] = [(f.name, {} if f.default_factory is dict else f.default) for f in dataclasses.fields(kind)]
    return {name: value for name, default in known if (value := getattr(item, name)) != default}
