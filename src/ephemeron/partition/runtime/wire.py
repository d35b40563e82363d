"""Values by name as a few words and raw buffers, and back. No pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ephemeron.errors import JobError

_DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
_PLAIN = (bool, int, float, str, type(None))


def packed(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[memoryview]]:
    """What to say, and buffers that stand on the tensors' own memory where that is contiguous.

    Raises:
        JobError: a value is neither a dense tensor nor a plain number, word or None; names it.
    """
    said: list[list[Any]] = []
    buffers: list[memoryview] = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise JobError(f"{name} is a sparse tensor, which does not travel", remedy="use dense gradients")
            said.append([name, str(value.dtype).removeprefix("torch."), list(value.shape)])
            if value.numel():
                flat = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
                buffers.append(flat.view(torch.uint8).numpy().data)
        elif isinstance(value, _PLAIN):
            said.append([name, value])
        else:
            raise JobError(
                f"{name} is {type(value).__name__}, which does not travel between processes",
                remedy="put the operators that make and read it on one device",
            )
    return {"values": said}, buffers


def unpacked(said: Mapping[str, Any], buffers: Sequence[Any]) -> dict[str, Any]:
    """Values by name; tensors stand on the buffers."""
    made: dict[str, Any] = {}
    given = iter(buffers)
    for name, first, *rest in said["values"]:
        if not rest:
            made[name] = first
            continue
        dtype, shape = _DTYPES[first], rest[0]
        if any(n == 0 for n in shape):
            made[name] = torch.empty(shape, dtype=dtype)
        else:
            made[name] = torch.frombuffer(next(given), dtype=dtype).reshape(shape)
    return made


def nbytes_of(buffers: Sequence[memoryview]) -> int:
    """Of all together."""
    return sum(b.nbytes for b in buffers)
