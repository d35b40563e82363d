"""JPEG decoding and augmentation: a flow beside PyTorch's DataLoader with as many workers, on this machine.

    python -m benchmarks.loading [--json] [--images 512] [--workers 2] [--rounds 5]

Photos of 256 × 256 (made here, about 20 kB each) are imported, decoded, cropped, flipped and normalised to 224 × 224. Both
sides run the same functions on the same files with the same batches; rounds alternate, the first epoch of each side (starts of
processes, imports) is left out, and medians count. Decoding bounds one host, so the goal is to be never slower than DataLoader by
more than 5 %. `waiting` is with a trainer that takes 60 % of the time that loading takes.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.common import SEED, environment, write

BATCH = 64


def photos(folder: Path, images: int) -> None:
    """Smooth noise in ten classes, compressed as photos are."""
    from PIL import Image

    dice = np.random.default_rng(SEED)
    for i in range(images):
        small = dice.integers(0, 256, (24, 24, 3), dtype=np.uint8)
        place = folder / f"class{i % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(small).resize((256, 256), Image.Resampling.BICUBIC).save(place / f"{i:05}.jpg", quality=90)


def augment(image: Any) -> Any:
    """Random crop to 224, random flip, normalised, channels first."""
    from PIL import Image

    if not isinstance(image, Image.Image):
        image = Image.fromarray(np.asarray(image))
    size = random.randint(160, 256)
    left, top = random.randint(0, 256 - size), random.randint(0, 256 - size)
    image = image.resize((224, 224), Image.Resampling.BILINEAR, box=(left, top, left + size, top + size))
    array = np.asarray(image, dtype=np.float32)
    if random.random() < 0.5:
        array = array[:, ::-1]
    return np.ascontiguousarray((array / 255 - 0.45).transpose(2, 0, 1) / 0.22)


class Plain:
    """What one would write for DataLoader."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(p.name for p in folder.iterdir())
        self.files = [(f, classes.index(c)) for c in classes for f in sorted((folder / c).iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        from PIL import Image

        file, label = self.files[i]
        with Image.open(file) as image:
            return augment(image.convert("RGB")), label


def epoch(batches: Iterable[Any], step_s: float) -> dict[str, float]:
    """Samples per second, and the part of the time that a trainer waits."""
    samples, waited, began = 0, 0.0, time.perf_counter()
    asked = began
    for inputs, _ in batches:
        waited += time.perf_counter() - asked
        samples += len(inputs)
        if step_s:
            time.sleep(step_s)
        asked = time.perf_counter()
    seconds = time.perf_counter() - began
    return {"samples_per_s": samples / seconds, "waiting": waited / seconds}


@click.command()
@click.option("--images", default=512, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(images: int, workers: int, rounds: int, as_json: bool) -> None:
    """Measures how fast samples come."""
    from torch.utils.data import DataLoader

    from ephemeron.data.catalog import DatasetStore
    from ephemeron.data.catalog.importers import import_dataset
    from ephemeron.data.flow import DataLoadFlow, LocalDataLoadFlowReader

    with tempfile.TemporaryDirectory() as home:
        folder, store = Path(home) / "photos", str(Path(home) / "store")
        photos(folder, images)
        import_dataset("images", str(folder), "bench/photos", DatasetStore.open(store))
        flow = (
            DataLoadFlow("bench/photos")
            .dataset("bench/photos", variant="train", store=store)
            .map_data("augment", augment)
        )
        loader = DataLoader(
            Plain(folder), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
        )  # fmt: skip
        with flow.prepare_read(LocalDataLoadFlowReader(workers)).to_shuffled(
            BATCH, prefetch=4 * workers or 1
        ) as shuffled:
            sides = {"flow": shuffled, "dataloader": loader}
            for side in sides.values():
                epoch(side, 0.0)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name, side in sides.items():
                    found[name].append(epoch(side, 0.0))
            step_s = 0.6 * BATCH / median(r["samples_per_s"] for r in found["dataloader"])
            waits: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(max(1, rounds // 2)):
                for name, side in sides.items():
                    waits[name].append(epoch(side, step_s)["waiting"])
            counters = shuffled.counters.to_dict()
    speed = {name: median(r["samples_per_s"] for r in rows) for name, rows in found.items()}
    out = {
        "environment": environment(), "images": images, "workers": workers, "batch_size": BATCH, "rounds": rounds,
        "samples_per_s": {name: round(v, 1) for name, v in speed.items()},
        "ratio": round(median(
            a["samples_per_s"] / b["samples_per_s"] for a, b in zip(found["flow"], found["dataloader"], strict=True)
        ), 4), "goal": 0.95,
        "waiting_with_trainer": {name: round(median(v), 4) for name, v in waits.items()}, "step_s": round(step_s, 4),
        "all": found, "flow_counters": counters,
        "not_measured": "a service, two jobs that share it, latency of a store, other loaders",
    }  # fmt: skip
    if as_json:
        write(out)
        return
    for name, value in out["samples_per_s"].items():
        click.echo(f"{name:12} {value:8.1f} samples/s   waiting {out['waiting_with_trainer'][name]:.1%} with a trainer")
    click.echo(f"ratio {out['ratio']} (goal {out['goal']} or more)")


if __name__ == "__main__":
    main()
