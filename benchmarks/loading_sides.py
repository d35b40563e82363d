"""One side of `benchmarks.loading` in a process of its own: iterates on request and reports the rate of samples.

    python -m benchmarks.loading_sides SIDE FOLDER [--workers N] [--seed S] [--latency-ms L] [--cache-mb C] [--service DIR]

Each line on standard input is a request, `{"epochs": n, "step_s": s}`; each is answered by a line on standard output.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.common import SEED

BATCH = 64
CONNECTIONS = 16
"""Concurrent reads of a store's client."""


def photos(folder: Path, images: int) -> None:
    """Writes smooth noise in ten classes, compressed like photos."""
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


class Photos:
    """Decoded images and labels, as a user would write the dataset for any loader.

    Args:
        folder: with a folder per class.
        latency_s: simulated latency of the store; 0: local files.
    """

    def __init__(self, folder: Path, latency_s: float = 0.0) -> None:
        classes = sorted(p.name for p in folder.iterdir())
        self.files = [(str(f), classes.index(c)) for c in classes for f in sorted((folder / c).iterdir())]
        self.latency_s = latency_s

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        from PIL import Image

        if self.latency_s:
            time.sleep(self.latency_s)
        file, label = self.files[i]
        with Image.open(file) as image:
            return image.convert("RGB"), label


class ManyAtOnce(Photos):
    """The same with `__getitems__`, which reads many samples at once, as a store's client does."""

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(self.__getitem__, indices))


class Augmented:
    """A dataset with its steps, for loaders that have no steps."""

    def __init__(self, dataset: Photos) -> None:
        self.dataset = dataset
        many = getattr(dataset, "__getitems__", None)
        if many is not None:
            self.__getitems__ = lambda indices: [self._mapped(sample) for sample in many(indices)]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self._mapped(self.dataset[i])

    def _mapped(self, sample: tuple[Any, int]) -> tuple[Any, int]:
        return augment(sample[0]), sample[1]


class Asked:
    """Iterated anew by each `for`."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def side(name: str, folder: Path, *, workers: int, seed: int, latency_s: float, cache_mb: float, service: str) -> Any:
    """Iterable over batches of images and labels, epoch after epoch."""
    match name:
        case "dataloader" | "dataloader-many":
            from torch.utils.data import DataLoader

            plain = ManyAtOnce if name == "dataloader-many" else Photos
            return DataLoader(
                Augmented(plain(folder / "photos", latency_s)),
                BATCH,
                shuffle=True,
                num_workers=workers,
                persistent_workers=workers > 0,
                prefetch_factor=4 if workers else None,
            )
        case "flow" | "service":
            return _flow(name, folder, workers, seed, latency_s, cache_mb, service)
        case "grain":
            return _grain(folder, workers, seed)
        case "spdl":
            return _spdl(folder, workers)
    raise click.BadParameter(f"no side is called {name}")


def _flow(name: str, folder: Path, workers: int, seed: int, latency_s: float, cache_mb: float, service: str) -> Any:
    from ephemeron.data.flow import Flow, FlowReader, LocalReader

    flow = Flow(f"bench/photos-{latency_s:g}")
    if latency_s:
        flow = flow.dataset(ManyAtOnce(folder / "photos", latency_s))
    else:
        flow = flow.dataset("bench/photos", variant="train", store=str(folder / "store"))
    flow = flow.map_data("augment", augment)
    if name == "flow":
        reader: FlowReader = LocalReader(workers)
    else:
        from ephemeron.data.service import RemoteReader, ServiceSettings

        settings = ServiceSettings(ends_when_idle=True, idle_s=60, cache_mb=cache_mb, loaders=workers)
        reader = RemoteReader(folder=Path(service), settings=settings)
    return flow.prepare_read(reader).to_shuffled(BATCH, prefetch=4 * workers or 1, seed=seed)


def _grain(folder: Path, workers: int, seed: int) -> Any:
    import grain

    data = grain.MapDataset.source(Augmented(Photos(folder / "photos"))).seed(seed).shuffle().batch(BATCH)
    stream = data.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8))
    if workers:
        stream = stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return Asked(lambda: iter(stream))


def _spdl(folder: Path, workers: int) -> Any:
    from spdl.pipeline import PipelineBuilder

    dataset = Augmented(Photos(folder / "photos"))

    def stacked(samples: list[Any]) -> Any:
        import torch

        return torch.from_numpy(np.stack([s for s, _ in samples])), torch.tensor([label for _, label in samples])

    def begin() -> Iterator[Any]:
        order = random.sample(range(len(dataset)), len(dataset))
        pipeline = (
            PipelineBuilder()
            .add_source(order)
            .pipe(dataset.__getitem__, concurrency=workers)
            .aggregate(BATCH)
            .pipe(stacked)
            .add_sink(4 * workers)
            .build(num_threads=workers + 1)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return Asked(begin)


def epoch(batches: Iterable[Any], step_s: float) -> dict[str, float]:
    """Number of samples, the seconds that they took, and the seconds that the trainer waited."""
    samples, waited, began = 0, 0.0, time.perf_counter()
    asked = began
    for inputs, _ in batches:
        waited += time.perf_counter() - asked
        samples += len(inputs)
        if step_s:
            time.sleep(step_s)  # the trainer, which computes elsewhere
        asked = time.perf_counter()
    return {"samples": samples, "seconds": time.perf_counter() - began, "waited_s": waited}


@click.command()
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--workers", default=2)
@click.option("--seed", default=0)
@click.option("--latency-ms", default=0.0)
@click.option("--cache-mb", default=0.0)
@click.option("--service", default="")
def main(name: str, folder: Path, workers: int, seed: int, latency_ms: float, cache_mb: float, service: str) -> None:
    """Serves requests until standard input ends."""
    batches = side(name, folder, workers=workers, seed=seed, latency_s=latency_ms / 1000, cache_mb=cache_mb, service=service)
    for line in sys.stdin:
        request = json.loads(line)
        found = [epoch(batches, request["step_s"]) for _ in range(request["epochs"])]
        total = {key: sum(e[key] for e in found) for key in found[0]}
        sys.stdout.write(json.dumps(total) + "\n")
        sys.stdout.flush()
    if hasattr(batches, "close"):
        batches.close()


if __name__ == "__main__":
    main()
