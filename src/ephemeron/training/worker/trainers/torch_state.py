"""State of PyTorch trainers beside tensors: random generators and plain values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from ephemeron.training.task.tensors import seed_torch
from ephemeron.training.tensors import Arrays

_NumpyState: TypeAlias = tuple[str, np.ndarray, int, int, float]
_PythonState: TypeAlias = tuple[int, tuple[int, ...], float | None]

GlobalState: TypeAlias = tuple[torch.Tensor, _NumpyState, _PythonState]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGenerators:
    """Plain values of the states of NumPy's and Python's global generators; their words are among the arrays, as PyTorch's are."""

    numpy: tuple[str, int, int, float]
    """`numpy.random.get_state()` without its words."""
    python: tuple[int, float | None]
    """`random.getstate()` without its words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrainerState:
    """Plain values of a `TorchTrainer`'s state; initial weights have `bf16` only."""

    bf16: tuple[str, ...] = ()
    """Names of arrays that hold the bits of bfloat16."""
    random: RandomGenerators | None = None
    """None: initial weights."""
    program: Mapping[str, object] = field(default_factory=dict)
    """States of optimisers, schedulers and the task. See `task.state_codec`."""


class RandomState:
    """PyTorch's, NumPy's and Python's global random states, kept per trainer and active while it computes.

    Args:
        seed: of all three.
    """

    def __init__(self, seed: int) -> None:
        self._own = self.seeded(seed)

    @classmethod
    def seeded(cls, seed: int) -> GlobalState:
        """The states after seeding; the global ones stay as they are."""
        outside = cls.now()
        seed_torch(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        own = cls.now()
        cls.set(outside)
        return own

    @staticmethod
    def now() -> GlobalState:
        """The global states."""
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        numpy = (name, np.asarray(keys), int(position), int(has_gauss), float(gauss))
        version, numbers, following = random.getstate()
        return torch.get_rng_state(), numpy, (version, numbers, following)

    @staticmethod
    def set(state: GlobalState) -> None:
        """Sets the global states."""
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])

    @contextmanager
    def in_use(self) -> Iterator[GlobalState]:
        """Swaps the state in, and out again; gives the state before."""
        outside = self.now()
        self.set(self._own)
        try:
            yield self._own
        finally:
            self._own = self.now()
            self.set(outside)

    def is_at(self, state: GlobalState) -> bool:
        """Whether nothing has been drawn since a state."""
        (tensor, numpy, python), (torch_before, numpy_before, python_before) = self._own, state
        return (
            torch.equal(tensor, torch_before)
            and numpy[2:] == numpy_before[2:]
            and np.array_equal(numpy[1], numpy_before[1])
            and python == python_before
        )

    def save(self, arrays: Arrays) -> RandomGenerators:
        """The states as plain values; their words are added to `arrays`, under `random/`."""
        tensor, (name, keys, position, has_gauss, gauss), (version, numbers, following) = self._own
        arrays["random/torch"] = tensor.numpy().copy()
        arrays["random/numpy"] = np.array(keys, dtype=np.uint32)
        arrays["random/python"] = np.array(numbers, dtype=np.uint32)
        return RandomGenerators(numpy=(name, position, has_gauss, gauss), python=(version, following))

    def restore(self, arrays: Mapping[str, np.ndarray], generators: RandomGenerators) -> None:
        """Restores what `save` returned and added."""
        name, position, has_gauss, gauss = generators.numpy
        version, following = generators.python
        self._own = (
            torch.from_numpy(np.array(arrays["random/torch"])),
            (name, np.array(arrays["random/numpy"], dtype=np.uint32), position, has_gauss, gauss),
            (version, tuple(arrays["random/python"].tolist()), following),
        )
