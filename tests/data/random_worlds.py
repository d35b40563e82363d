"""Datasets whose own `__getitem__` is random, as most are that were written for PyTorch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

PLACES = 10_000


class Cropped:
    """Sample i is (where it was cropped, i): a transform inside the dataset, drawing from one kind of generator."""

    def __init__(self, samples: int = 96, kind: str = "numpy") -> None:
        self.samples, self.kind = samples, kind
        self.own = np.random.default_rng(0)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Any, int]:
        if not 0 <= i < self.samples:
            raise IndexError(i)
        return np.array([self._draw() for _ in range(4)]), i

    def _draw(self) -> int:
        if self.kind == "numpy":
            return int(np.random.randint(PLACES))
        if self.kind == "random":
            return random.randrange(PLACES)
        if self.kind == "own":
            return int(self.own.integers(PLACES))
        import torch

        return int(torch.randint(PLACES, ()))


class Batched(Cropped):
    """Fetches many at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        return [self[i] for i in indices]


def jitter(data: Any, rng: np.random.Generator) -> Any:
    """A step that takes its generator as an argument."""
    return np.append(data, rng.integers(PLACES))


def plain(samples: list[Any]) -> list[tuple[int, tuple[int, ...]]]:
    """A collate function that shows what was delivered."""
    return [(int(target), tuple(int(x) for x in data)) for data, target in samples]


def mixup(samples: list[Any]) -> tuple[list[int], float, float, list[int]]:
    """A random collate function: which samples, how much of each, and with whom."""
    share = float(np.random.beta(0.4, 0.4))
    order = list(range(len(samples)))
    random.shuffle(order)
    return [int(t) for _, t in samples], share, random.random(), order


def mixup_rng(samples: list[Any], rng: np.random.Generator) -> tuple[list[int], float]:
    """The same with a generator as an argument."""
    return [int(t) for _, t in samples], float(rng.beta(0.4, 0.4))


def trainer_state() -> tuple[Any, ...]:
    """Of the generators that a trainer draws from."""
    import torch

    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
