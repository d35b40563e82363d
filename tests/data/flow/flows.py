"""Small datasets and steps for flows."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.data.flow import Flow, FlowView, LocalReader


class Numbers:
    """Sample i is (an array of i, i)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int) -> tuple[Any, int]:
        if not 0 <= i < self.samples:
            raise IndexError(i)
        return np.full(3, i, dtype=np.float32), i


def noisy(data: Any) -> Any:
    """Draws from all global generators."""
    import torch

    return data + np.float32(random.random() + np.random.random() + float(torch.rand(())))


def flow(samples: int = 40) -> Flow:
    return Flow("test/numbers").dataset(Numbers(samples)).map_data("noisy", noisy)


def read(samples: int = 40, workers: int = 0, **options: Any) -> FlowView:
    return flow(samples).prepare_read(LocalReader(workers, **options))


def pairs(batches: Any) -> list[tuple[int, bytes]]:
    """Delivered samples: their number and their bytes, in order."""
    return [(int(target), np.asarray(data).tobytes()) for batch in batches for data, target in zip(*batch, strict=True)]


class Once:
    """A step that harms its own process when it comes upon a sample, a number of times."""

    def __init__(self, folder: Path, index: int, times: int = 1, sign: int = signal.SIGKILL) -> None:
        self.folder, self.index, self.times, self.sign = folder, index, times, sign

    def __call__(self, sample: tuple[Any, int]) -> tuple[Any, int]:
        if sample[1] == self.index and len(list(self.folder.iterdir())) < self.times:
            (self.folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()
            os.kill(os.getpid(), self.sign)
        return sample
