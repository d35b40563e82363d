"""Image classification: ResNet-18 (He et al. 2016) on a folder of images, one folder per class.

    python examples/classification.py --samples 400 --epochs 5 --loaders 2

The images are generated: discs, squares, crosses and stripes in noise. For your own images:
ephemeron data import images FOLDER me/shapes
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ephemeron.data.catalog import DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.flow import Flow

NAME = "example/shapes"
CLASSES = ("cross", "disc", "square", "stripes")
SIZE = 40
"""Width and height of the images in pixels."""
CROP = 32


def make(folder: Path, *, samples: int, seed: int = 0) -> None:
    """Writes images to `folder/images` and describes them in `folder/store`."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    for i in range(samples):
        name = CLASSES[i % len(CLASSES)]
        place = folder / "images" / name / f"{i:05}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw(name, rng)).save(place)
    import_dataset("images", str(folder / "images"), NAME, DatasetStore.open(str(folder / "store")))


def draw(name: str, rng: np.random.Generator) -> Any:
    """One image: uint8, SIZE × SIZE × 3."""
    y, x = np.mgrid[:SIZE, :SIZE] - rng.uniform(SIZE * 0.4, SIZE * 0.6, (2, 1, 1))
    r = rng.uniform(7, 13)
    shape = {
        "cross": (abs(x) < r / 3) & (abs(y) < r) | (abs(y) < r / 3) & (abs(x) < r),
        "disc": x**2 + y**2 < r**2,
        "square": np.maximum(abs(x), abs(y)) < r * 0.9,
        "stripes": (np.maximum(abs(x), abs(y)) < r) & (np.sin(x) > 0),
    }[name]
    image = rng.normal(90, 25, (SIZE, SIZE, 3)) + shape[..., None] * rng.uniform(60, 110, 3)
    return image.clip(0, 255).astype(np.uint8)


def train(path: Path) -> Flow:
    """Flow for training, with random crops and flips."""
    return plain(path).map_data("crop", crop).map_data("flip", flip).map_data("planes", planes)


def held_out(path: Path) -> Flow:
    """Flow for tests: the same samples without random changes."""
    return plain(path).map_data("centre", centre).map_data("planes", planes)


def plain(path: Path) -> Flow:
    flow = Flow("example/shapes").dataset(NAME, variant="train", store=str(path))
    return flow.map_data("to_float", to_float, cache_control="can-cache")


def to_float(image: Any) -> Any:
    """uint8 to float32 in about [-1, 1]."""
    return image.astype(np.float32) / 127.5 - 1


def crop(image: Any) -> Any:
    top, left = random.randint(0, SIZE - CROP), random.randint(0, SIZE - CROP)
    return image[top : top + CROP, left : left + CROP]


def centre(image: Any) -> Any:
    first = (SIZE - CROP) // 2
    return image[first : first + CROP, first : first + CROP]


def flip(image: Any) -> Any:
    return image[:, ::-1] if random.random() < 0.5 else image


def planes(image: Any) -> Any:
    """H×W×C to C×H×W."""
    return np.ascontiguousarray(image.transpose(2, 0, 1))


class Block(nn.Module):
    """Two convolutions beside an identity, or beside a projection where the shape changes (He et al., figure 2)."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and channels == out
        self.side = nn.Identity() if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.side(x))


def build(classes: int = len(CLASSES), width: int = 64) -> nn.Module:
    """ResNet-18 (He et al., table 1): four stages of two blocks, 11 million parameters at width 64."""
    stages: list[nn.Module] = []
    channels = width
    for stage in range(4):
        for block in range(2):
            out = width * 2**stage
            stages.append(Block(channels, out, stride=2 if stage and not block else 1))
            channels = out
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores, labels)


if __name__ == "__main__":
    from fitting import main

    main("classification")
