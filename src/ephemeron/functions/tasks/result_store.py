"""Results by reference: what a task returned as a value of its result, or as an object that the result names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ephemeron.communication.channels.base import Buffer, Channel, joined
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.communication.durable_put import create_durable, create_durable_from
from ephemeron.errors import JobError
from ephemeron.functions.tasks.model import TaskResult, TaskSpec

INLINE_BYTES = 64 * 1024
"""Larger results become objects of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutputs:
    """What a task returns that stores several objects, or a large one without a copy."""

    objects: Mapping[str, Sequence[Buffer]]
    """By key; the first object under a key stays."""
    value: object = None
    """JSON value of the result."""


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result, and the object that has to be stored before it is recorded."""

    result: TaskResult
    key: str = ""
    data: bytes = b""
    """Empty if there is no object."""
    objects: Mapping[str, Sequence[Buffer]] = field(default_factory=dict)
    """See `TaskOutputs`."""

    @property
    def nbytes(self) -> int:
        """Of all objects."""
        return len(self.data) + sum(map(size_of, self.objects.values()))

    async def put(self, channel: Channel) -> bool:
        """Stores the objects. The first whole one under a key stays, so an output is the same for all that read it.

        Returns:
            Whether they are as this result has them.
        """
        if self.key:
            await create_durable(channel, self.key, self.data, alike=True)
        there = await asyncio.gather(*(create_durable_from(channel, *each, alike=True) for each in self.objects.items()))
        return all(data is None or data == joined(buffers) for data, buffers in zip(there, self.objects.values(), strict=True))


def stored_result(task: TaskSpec, value: object, *, key: str, executor: str, compute_s: float) -> StoredResult:
    """A success.

    Args:
        task: that ran.
        value: bytes, JSON, or `TaskOutputs`.
        key: of the object, if one is needed and the task does not name it.
        executor: owner.
        compute_s: seconds that the task took.

    Raises:
        JobError: the value is neither bytes nor JSON.
    """
    result = TaskResult(id=task.id, executor=executor, compute_s=compute_s)
    if isinstance(value, TaskOutputs):
        return StoredResult(replace(result, value=value.value), objects=value.objects)
    is_json = not isinstance(value, (bytes, bytearray, memoryview))
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
    elif value is None and not task.output:
        return StoredResult(result)
    else:
        try:
            data = json.dumps(value, separators=(",", ":")).encode()
        except (TypeError, ValueError) as e:
            raise JobError(f"the task returned a {type(value).__name__}: {e}", remedy="return bytes or JSON") from e
    if task.output or len(data) > INLINE_BYTES:
        key = task.output or key
        return StoredResult(replace(result, ref=key, ref_is_json=is_json), key, data)
    return StoredResult(replace(result, value=value) if is_json else replace(result, data=data))
