"""Flows for end-to-end tests, over the dataset `test/digits` of the store at `path`."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ephemeron.data.flow import Flow


def scale(image: Any) -> Any:
    return image.astype(np.float32) / 16


def jitter(image: Any) -> Any:
    """Draws from every global generator."""
    return image + np.float32(0.2 * (random.random() + np.random.normal() + float(torch.rand(()))))


def plain(path: Path) -> Flow:
    return Flow("test/plain").dataset("test/digits", variant="train", store=str(path)).map_data("scale", scale)


def shaken(path: Path) -> Flow:
    return plain(path).map_data("jitter", jitter)


def in_bucket(url: str) -> Flow:
    flow = Flow("test/bucket").dataset("test/digits", variant="train", store=url)
    return flow.map_data("scale", scale).map_data("jitter", jitter)


def held_out(path: Path) -> Flow:
    return Flow("test/held-out").dataset("test/digits", variant="val", store=str(path)).map_data("scale", scale)


def picky(path: Path, above: int = 40) -> Flow:
    """Fails for images that begin with a large number."""

    def check(image: Any) -> Any:
        if image[0, 0] >= above:
            raise ValueError(f"a pixel of {image[0, 0]}")
        return image

    flow = Flow("test/picky").dataset("test/digits", variant="train", store=str(path))
    return flow.map_data("check", check).map_data("scale", scale)


class Cropped:
    """Random in its own `__getitem__`, by every global generator and one of its own."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(0)

    def __len__(self) -> int:
        return 150

    def __getitem__(self, i: int) -> tuple[Any, int]:
        drawn = random.random() + np.random.random() + float(torch.rand(())) + self.own.random()
        return np.full((8, 8), i % 8 + 0.1 * drawn, dtype=np.float32), i % 8


def cropped() -> Flow:
    return Flow("test/cropped").dataset(Cropped())


def of_the_system() -> Flow:
    """Draws what nobody can seed."""
    return cropped().map_data("salt", lambda image: image + os.urandom(1)[0])


def mixed_up(samples: list[Any]) -> Any:
    """A random collate function."""
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs * float(np.random.beta(2.0, 2.0)) + random.random(), targets


class Ragged:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return np.zeros(i + 1, dtype=np.float32), i


def ragged() -> Flow:
    return Flow("test/ragged").dataset(Ragged())


def empty() -> Flow:
    return Flow("test/empty").dataset([])


def without_dataset() -> Flow:
    return Flow("test/nothing")


def absent(path: Path) -> Flow:
    return Flow("test/absent").dataset("test/no-such", store=str(path))


def three() -> int:
    return 3


def triples(samples: list[Any]) -> Any:
    return 1, 2, 3


def arrays(path: Path) -> Any:
    """The same samples as a Dataset, which is put into arrays before the run."""
    return plain(path).prepare_read().to_mapped()
