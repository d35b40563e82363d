"""Tensors and arrays: conversion of batches and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from ephemeron.errors import JobError

Arrays: TypeAlias = dict[str, np.ndarray]


def seed_torch(seed: int) -> None:
    """As `torch.manual_seed`, which keeps a stack trace for every kind of accelerator that is absent, ten times as slow as seeding."""
    if torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a tensor as an array; bfloat16, which NumPy lacks, as its bits in uint16."""
    tensor = tensor.detach().cpu()
    bits = tensor.contiguous().view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return bits.numpy().copy()


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> tuple[Arrays, list[str]]:
    """Tensors as arrays, and the names of those in bfloat16. See `to_array`."""
    arrays = {name: to_array(tensor) for name, tensor in tensors.items()}
    return arrays, [name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16]


def to_tensor(array: np.ndarray, bf16: bool) -> torch.Tensor:
    """The inverse of `to_array`, a copy."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if bf16 else tensor


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Each parameter and buffer once, also buffers that `state_dict()` leaves out."""
    return [*model.named_parameters(), *model.named_buffers()]


def model_arrays(model: nn.Module) -> tuple[Arrays, Mapping[str, object]]:
    """Initial weights of a model, for `TorchTrainer.load`."""
    arrays, bf16 = to_arrays(dict(named_tensors(model)))
    return arrays, {"bf16": bf16} if bf16 else {}


def as_tensors(value: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Arrays as tensors, floats in a dtype, on a device; trees of them likewise; anything else as it is. An array with fields is a dict.

    Args:
        dtype: of floating-point values; None: their own.
        device: None: their own.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(as_tensors(inner, dtype, device) for inner in value))
    if isinstance(value, (tuple, list)):
        return type(value)(as_tensors(inner, dtype, device) for inner in value)
    if isinstance(value, Mapping):
        converted = {key: as_tensors(inner, dtype, device) for key, inner in value.items()}
        if type(value) is dict:
            return converted
        try:
            return type(value)(converted)  # type: ignore[call-arg]
        except TypeError:
            return converted
    if isinstance(value, np.ndarray):
        if value.dtype.names:
            return {name: as_tensors(value[name], dtype, device) for name in value.dtype.names}
        value = torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor):
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        return value if device is None else value.to(device)
    if device is not None and hasattr(value, "to") and not isinstance(value, type):
        return value.to(device)
    return value


def parts_of(batch: Any, samples: int, parts: int, *, option: str = "accumulate") -> list[tuple[Any, int]]:
    """A batch cut along its first axis into parts whose sizes differ by at most one, each with its number of samples.

    Tensors and lists of which the first axis is not the sample are in every part.

    Args:
        option: that asks for the parts, for messages.

    Raises:
        JobError: no tensor or list of the batch has one element per sample.
    """
    parts = min(parts, samples)
    if parts == 1:
        return [(batch, samples)]
    size, extra = divmod(samples, parts)
    ends = [size * (i + 1) + min(i + 1, extra) for i in range(parts)]
    found = [False]
    cut = [(_cut(batch, samples, start, end, found), end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    if not found[0]:
        remedy = f"leave {option} out, or let the collate function make tensors whose first axis is the sample"
        raise _undivided(batch, samples, remedy)
    return cut


def sliced(batch: Any, samples: int, start: int, end: int) -> Any:
    """Samples `start:end` of a batch. See `parts_of`."""
    found = [False]
    part = _cut(batch, samples, start, end, found)
    if not found[0]:
        raise _undivided(batch, samples, "let the loader yield tensors whose first axis is the sample")
    return part


def _undivided(batch: Any, samples: int, remedy: str) -> JobError:
    what = f"a batch of {samples} samples cannot be divided: it is a {type(batch).__name__} without a tensor of that length"
    return JobError(what, remedy=remedy)


def _cut(value: Any, samples: int, start: int, end: int, found: list[bool]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cut(v, samples, start, end, found) for v in value))
    if isinstance(value, Mapping):
        converted = {k: _cut(v, samples, start, end, found) for k, v in value.items()}
        return converted if type(value) is dict else type(value)(converted)  # type: ignore[call-arg]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if value.ndim and len(value) == samples:
            found[0] = True
            return value[start:end]
        return value
    if isinstance(value, (tuple, list)):
        if len(value) == samples and not any(isinstance(v, (torch.Tensor, np.ndarray, Mapping)) and _long(v, samples) for v in value):
            found[0] = True
            return value[start:end]
        return type(value)(_cut(v, samples, start, end, found) for v in value)
    return value


def _long(value: Any, samples: int) -> bool:
    """Whether a value is a batch of so many samples itself, and so its sequence is none of samples."""
    if isinstance(value, Mapping):
        return any(_long(v, samples) for v in value.values())
    return bool(getattr(value, "ndim", 0)) and len(value) == samples
