"""Named values as a table for a header and raw buffers, and back. No pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from ephemeron.errors import JobError

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
