"""Object detection: a single-shot multibox detector (SSD, Liu et al. 2016) on images annotated in COCO's format.

    python examples/detection.py --samples 300 --epochs 5 --loaders 2

Images have different sizes and different numbers of objects, so a step gets image and boxes together, and `collate` keeps
targets as a list. The images are generated: bright and dark rectangles in noise. For your own images:
ephemeron data import coco IMAGES me/things -o annotations=instances.json
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ephemeron.data.catalog import DatasetStore
from ephemeron.data.catalog.importers import import_dataset
from ephemeron.data.flow import Flow

NAME = "example/things"
CLASSES = ("bright", "dark")
SIZE = 64
"""Images are resized to SIZE × SIZE pixels."""
SCALES = (0.2, 0.45)
"""Sizes of default boxes, one per feature map (SSD, section 2.2)."""
RATIOS = (1.0, 2.0, 0.5)
"""Ratios of width to height of the default boxes at each position."""
NEGATIVES = 3
"""Number of unmatched boxes with the greatest loss that count per matched box (SSD, section 2.2: hard negative mining)."""
MATCHED = 0.5
"""Overlap from which a default box is matched."""
SPREAD = (0.1, 0.2)
"""Scales of the offsets of centres and of sizes."""


def make(folder: Path, *, samples: int, seed: int = 0) -> None:
    """Writes images and annotations to `folder/images` and describes them in `folder/store`."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    images, notes = [], []
    for i in range(samples):
        height, width = (int(n) for n in rng.integers(60, 110, 2))
        pixels = rng.normal(127, 12, (height, width, 3))
        for _ in range(int(rng.integers(1, 4))):
            kind = int(rng.integers(len(CLASSES)))
            w, h = int(rng.integers(width // 5, width // 2)), int(rng.integers(height // 5, height // 2))
            x, y = int(rng.integers(width - w)), int(rng.integers(height - h))
            pixels[y : y + h, x : x + w] += (95, -95)[kind]
            notes.append({"id": len(notes), "image_id": i, "category_id": 10 * kind + 1, "bbox": [x, y, w, h]})
        name = f"{i:06}.png"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "images" / name)
        images.append({"id": i, "file_name": name})
    categories = [{"id": 10 * i + 1, "name": name} for i, name in enumerate(CLASSES)]
    table = {"images": images, "annotations": notes, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(table))
    options = {"annotations": str(folder / "instances.json")}
    import_dataset("coco", str(folder / "images"), NAME, DatasetStore.open(str(folder / "store")), options=options)


def train(path: Path) -> Flow:
    """Flow for training, with random flips of image and boxes together."""
    return (
        Flow("example/things")
        .dataset(NAME, variant="train", store=str(path))
        .map("relative", relative, cache_control="can-cache")
        .map("flip", flip)
        .map_data("resize", resize)
    )


def held_out(path: Path) -> Flow:
    """Flow for tests."""
    flow = Flow("example/things-held-out").dataset(NAME, variant="train", store=str(path))
    return flow.map("relative", relative).map_data("resize", resize)


def relative(sample: tuple[Any, Any]) -> tuple[Any, Any]:
    """Converts boxes from COCO's [x, y, width, height] in pixels to centre, width and height relative to the image."""
    image, target = sample
    height, width = image.shape[:2]
    boxes = np.array(target["boxes"], dtype=np.float32).reshape(-1, 4)
    boxes[:, :2] += boxes[:, 2:] / 2
    boxes /= np.array([width, height, width, height], dtype=np.float32)
    return image, {"boxes": boxes, "labels": np.array(target["labels"], dtype=np.int64)}


def flip(sample: tuple[Any, Any]) -> tuple[Any, Any]:
    image, target = sample
    if random.random() < 0.5:
        return sample
    boxes = target["boxes"].copy()
    boxes[:, 0] = 1 - boxes[:, 0]
    return image[:, ::-1], {**target, "boxes": boxes}


def resize(image: Any) -> Any:
    """Converts an image to float32, 3 × SIZE × SIZE, by the nearest pixel."""
    rows, columns = (np.arange(SIZE) * n // SIZE for n in image.shape[:2])
    return np.ascontiguousarray(image[rows][:, columns].transpose(2, 0, 1)).astype(np.float32) / 127.5 - 1


def collate(samples: list[Any]) -> tuple[Any, list[dict[str, Any]]]:
    """Collates images into one tensor, and targets into a list, because images differ in their numbers of boxes."""
    images = torch.from_numpy(np.stack([image for image, _ in samples]))
    return images, [{name: torch.from_numpy(part) for name, part in target.items()} for _, target in samples]


def overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Intersection over union of every box of `a` (n, 4) with every box of `b` (m, 4), as (n, m)."""
    low = torch.maximum((a[:, :2] - a[:, 2:] / 2)[:, None], b[:, :2] - b[:, 2:] / 2)
    high = torch.minimum((a[:, :2] + a[:, 2:] / 2)[:, None], b[:, :2] + b[:, 2:] / 2)
    both = (high - low).clamp(min=0).prod(dim=2)
    return both / (a[:, 2:].prod(dim=1)[:, None] + b[:, 2:].prod(dim=1) - both)


def default_boxes(cells: int, scale: float) -> torch.Tensor:
    """Default boxes of a feature map of cells × cells, as (cells·cells·ratios, 4)."""
    at = (torch.arange(cells) + 0.5) / cells
    boxes = [torch.tensor([x, y, scale * ratio**0.5, scale / ratio**0.5]) for y in at for x in at for ratio in RATIOS]
    return torch.stack(boxes)


class Detector(nn.Module):
    """Small backbone, with scores and offsets for default boxes on two of its feature maps."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def down(channels: int, out: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.GroupNorm(4, out), nn.ReLU())

        self.first = nn.Sequential(down(3, width), down(width, 2 * width), down(2 * width, 4 * width))
        self.second = down(4 * width, 4 * width)
        each = len(RATIOS) * (len(CLASSES) + 1 + 4)
        self.heads = nn.ModuleList(nn.Conv2d(4 * width, each, 3, padding=1) for _ in SCALES)
        boxes = [default_boxes(SIZE // 8, SCALES[0]), default_boxes(SIZE // 16, SCALES[1])]
        self.register_buffer("boxes", torch.cat(boxes))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores (N, boxes, classes + 1; 0 is the background), offsets (N, boxes, 4), and the default boxes."""
        fine = self.first(images)
        maps = [head(x) for head, x in zip(self.heads, (fine, self.second(fine)), strict=True)]
        parts = [m.permute(0, 2, 3, 1).reshape(len(images), -1, len(CLASSES) + 5) for m in maps]
        scores, offsets = torch.cat(parts, dim=1).split([len(CLASSES) + 1, 4], dim=2)
        return scores, offsets, self.boxes


def build(width: int = 16) -> nn.Module:
    return Detector(width)


def match(boxes: torch.Tensor, target: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Class of every default box (0: background) and its matched object (SSD, section 2.2).

    Each object is matched to the default box that overlaps it most, and to every box that overlaps it by half.
    """
    if len(target["boxes"]) == 0:
        nothing = torch.zeros(len(boxes), dtype=torch.long)
        return nothing, nothing
    shared = overlap(boxes, target["boxes"])
    best, which = shared.max(dim=1)
    mine = shared.argmax(dim=0)
    best[mine] = 1.0
    which[mine] = torch.arange(len(mine))
    return torch.where(best >= MATCHED, target["labels"][which] + 1, 0), which


def encoded(objects: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Offsets from default boxes to these objects (SSD, equation 2)."""
    centres = (objects[:, :2] - boxes[:, :2]) / boxes[:, 2:] / SPREAD[0]
    return torch.cat([centres, (objects[:, 2:] / boxes[:, 2:]).log() / SPREAD[1]], dim=1)


def decoded(offsets: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Inverse of `encoded`."""
    centres = offsets[:, :2] * SPREAD[0] * boxes[:, 2:] + boxes[:, :2]
    return torch.cat([centres, (offsets[:, 2:] * SPREAD[1]).exp() * boxes[:, 2:]], dim=1)


def loss(output: tuple[torch.Tensor, ...], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Multibox loss (SSD, equation 1), per image divided by its matches, and averaged over images.

    SSD divides by the matches of the whole batch. The loss of a batch would then not be the mean over its images, and gradients of
    workers with equally many images could not be added up.
    """
    scores, offsets, boxes = output
    return torch.stack([_of_image(s, o, boxes, t) for s, o, t in zip(scores, offsets, targets, strict=True)]).mean()


def _of_image(scores: torch.Tensor, offsets: torch.Tensor, boxes: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    classes, which = match(boxes, target)
    found = classes > 0
    matches = max(1, int(found.sum()))
    confidence = nn.functional.cross_entropy(scores, classes, reduction="none")
    hard = confidence.detach().masked_fill(found, -1.0).topk(min(NEGATIVES * matches, len(boxes))).indices
    kept = found.clone()
    kept[hard] = True
    place = scores.new_zeros(())
    if found.any():
        wanted = encoded(target["boxes"][which[found]], boxes[found])
        place = nn.functional.smooth_l1_loss(offsets[found], wanted, reduction="sum")
    return (confidence[kept].sum() + place) / matches


if __name__ == "__main__":
    from fitting import main

    main("detection")
