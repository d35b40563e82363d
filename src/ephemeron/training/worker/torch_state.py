"""State of PyTorch trainers as named arrays and plain values: tensors, optimisers, random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from ephemeron.training.tensors import Arrays

_NumpyState: TypeAlias = tuple[str, np.ndarray, int, int, float]
_PythonState: TypeAlias = tuple[int, tuple[int, ...], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """An optimiser's `state_dict()` without its tensors."""

    values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """By parameter, values that are no tensors."""
    groups: tuple[Mapping[str, object], ...] = ()
    """`param_groups`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGenerators:
    """States of NumPy's and Python's global generators. PyTorch's is among the arrays."""

    numpy: tuple[str, tuple[int, ...], int, int, float]
    """`numpy.random.get_state()`."""
    python: tuple[int, tuple[int, ...], float | None]
    """`random.getstate()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrainerState:
    """Plain values of a `TorchTrainer`'s state; initial weights have `bf16` only."""

    bf16: tuple[str, ...] = ()
    """Names of arrays that hold the bits of bfloat16."""
    optimizer: OptimizerState | None = None
    random: RandomGenerators | None = None


class RandomState:
    """PyTorch's, NumPy's and Python's global random states, kept per trainer and active while it computes.

    Args:
        seed: of all three.
    """

    def __init__(self, seed: int) -> None:
        outside = self._global()
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._own = self._global()
        self._set(outside)

    @staticmethod
    def _global() -> tuple[torch.Tensor, _NumpyState, _PythonState]:
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        numpy = (name, np.asarray(keys), int(position), int(has_gauss), float(gauss))
        version, numbers, following = random.getstate()
        return torch.get_rng_state(), numpy, (version, numbers, following)

    @staticmethod
    def _set(state: tuple[torch.Tensor, _NumpyState, _PythonState]) -> None:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Swaps the state in, and out again."""
        outside = self._global()
        self._set(self._own)
        try:
            yield
        finally:
            self._own = self._global()
            self._set(outside)

    def save(self) -> tuple[np.ndarray, RandomGenerators]:
        """PyTorch's state as an array, and the others."""
        tensor, (name, keys, position, has_gauss, gauss), python = self._own
        numpy = (name, tuple(keys.tolist()), int(position), int(has_gauss), float(gauss))
        return tensor.numpy().copy(), RandomGenerators(numpy=numpy, python=python)

    def restore(self, tensor: np.ndarray, generators: RandomGenerators) -> None:
        """Restores what `save` returned."""
        name, keys, position, has_gauss, gauss = generators.numpy
        self._own = (
            torch.from_numpy(np.array(tensor)),
            (name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss),
            generators.python,
        )


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> tuple[Arrays, list[str]]:
    """Tensors as arrays, and the names of those in bfloat16, which NumPy lacks: they are the bits, as uint16."""
    bf16 = [n for n, t in tensors.items() if t.dtype == torch.bfloat16]
    arrays = {
        n: (t.contiguous().view(torch.uint16) if t.dtype == torch.bfloat16 else t).cpu().numpy().copy()
        for n, t in tensors.items()
    }
    return arrays, bf16


def to_tensor(array: np.ndarray, bf16: bool) -> torch.Tensor:
    """The inverse of `to_arrays`, for one array."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if bf16 else tensor


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Each parameter and buffer once, also buffers that `state_dict()` leaves out."""
    return [*model.named_parameters(), *model.named_buffers()]


def model_arrays(model: nn.Module) -> tuple[Arrays, Mapping[str, object]]:
    """Initial weights of a model, for `TorchTrainer.load`."""
    arrays, bf16 = to_arrays({n: t.detach() for n, t in named_tensors(model)})
    return arrays, {"bf16": bf16} if bf16 else {}
