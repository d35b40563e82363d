"""Simulated regions for the parts of `benchmarks.geo`: generated data, IID or skewed, and runs in virtual time with real gradients.

Regions meet in a store: an update crosses the uplink of its sender and the downlink of its receiver, each with the bandwidth and the latency given. Bytes are
those that regions have metered (`train --json`: `regions`).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks import geo_models
from ephemeron.data.spec import DataSpec
from ephemeron.events import Evaluated, RegionExchanged
from ephemeron.regions.driver.launch import divide
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Job, JobLimits, RunRegion, Simulation, Target

MEMORY_MB = 10_240
"""Largest quota of AWS Lambda: almost six vCPUs, so that two functions stand for the twelve cores of a region."""
SKEWED = 0.6
"""Share of the samples that are sorted by class before they are divided among skewed regions."""

T = TypeVar("T")
_ARRAYS = ("inputs", "targets", "test_inputs", "test_targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model on generated data."""

    model: str
    """Function of `benchmarks.geo_models`."""
    samples: int
    test: int
    epochs: int
    lr: float
    iteration_s: float
    """Seconds of an iteration of every function."""
    batch_size: int = 16
    """Of a function."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wan:
    """Links of all regions."""

    mbit_s: float = 100.0
    latency_s: float = 0.03


def images(rng: np.random.Generator, count: int, *, size: int, channels: int, noise: float, wrong: float) -> Any:
    """Images of ten classes: a smooth pattern of its class in one of four positions, with noise; a share has a wrong label."""
    patterns = np.random.default_rng(5).normal(size=(10, channels, size // 2, size // 2)).repeat(2, 2).repeat(2, 3)
    labels = rng.integers(0, 10, count)
    shifted = rng.integers(0, 2, (count, 2))
    inputs = np.stack([np.roll(patterns[c], tuple(s), (1, 2)) for c, s in zip(labels, shifted, strict=True)])
    inputs = inputs + noise * rng.normal(size=inputs.shape)
    replaced = rng.random(count) < wrong
    labels = np.where(replaced, rng.integers(0, 10, count), labels)
    return inputs.astype(np.float32), labels.astype(np.int64)


def choices(rng: np.random.Generator, count: int) -> Any:
    """Users, items and contexts with Frappe's numbers of values; users choose by factors of two, with noise."""
    truth = np.random.default_rng(6)
    inputs = np.stack([(n * rng.random(count) ** 2.5).astype(np.int64) for n in geo_models.FEATURES], axis=1)
    effects = [truth.normal(size=n) for n in geo_models.FEATURES]
    tastes = [truth.normal(size=(n, 2)) for n in geo_models.FEATURES[:4]]
    score = sum(e[inputs[:, i]] for i, e in enumerate(effects))
    score = score + 1.5 * (tastes[0][inputs[:, 0]] * tastes[2][inputs[:, 2]]).sum(1)
    return inputs, (score + 0.8 * rng.logistic(size=count) > 0).astype(np.int64)


def generated(workload: Workload, seed: int, *, shares: tuple[float, ...] = (), skewed: bool = False) -> dict[str, Any]:
    """Training and test samples.

    Args:
        workload: of the job.
        seed: of the samples, and of the job.
        shares: of the regions.
        skewed: arrange the samples so that regions of these shares have different classes.
    """
    rng = np.random.default_rng([seed, 11])
    total = workload.samples + workload.test
    if workload.model == "deepfm":
        inputs, targets = choices(rng, total)
    elif workload.model == "resnet":
        inputs, targets = images(rng, total, size=8, channels=3, noise=1.6, wrong=0.2)
    elif workload.model == "lenet":
        inputs, targets = images(rng, total, size=16, channels=1, noise=1.9, wrong=0.0)
    else:
        inputs, targets = rng.normal(size=(total, 64)).astype(np.float32), rng.integers(0, 10, total)
    n = workload.samples
    found = {"test_inputs": inputs[n:], "test_targets": targets[n:]}
    order = np.arange(n)
    if skewed:
        sorted_ones = np.flatnonzero(rng.random(n) < SKEWED)
        order[sorted_ones] = sorted_ones[np.argsort(targets[sorted_ones], kind="stable")]
        # `order` runs through the regions one after the other; samples are stored where `divide` finds them.
        places = np.concatenate([np.asarray(part) for part in divide(n, shares, seed=seed)])
        position = np.empty(n, dtype=int)
        position[places] = order
        order = position
    return found | {"inputs": inputs[:n][order], "targets": targets[:n][order]}


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for jobs, data and runs."""
    before = os.environ.get("EPHEMERON_HOME")
    sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]  # reports without pictures, which take longer than the runs
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ephemeron-benchmark-") as name:
        folder = Path(name)
        (folder / "code").mkdir()
        shutil.copy(geo_models.__file__, folder / "code")
        os.environ["EPHEMERON_HOME"] = str(folder / "home")
        try:
            yield folder
        finally:
            os.environ.pop("EPHEMERON_HOME")
            if before is not None:
                os.environ["EPHEMERON_HOME"] = before


def job_of(
    folder: Path,
    workload: Workload,
    seed: int,
    wan: Wan,
    *,
    shares: tuple[float, ...] = (1.0, 1.0),
    skewed: bool = False,
    evaluate_every: str = "1 epoch",
) -> Job:
    """A job on generated data, whose functions are almost six vCPUs large."""
    path = folder / f"{workload.model}-{seed}-{skewed}.npz"
    if not path.exists():
        np.savez(path, **generated(workload, seed, shares=shares, skewed=skewed))
    compute: Any = {"a": workload.iteration_s * MEMORY_MB / workload.batch_size, "b": 0.0, "m": 0.0}
    world = Simulation(
        latency_s=0.001,
        bandwidth_mb_s=200.0,
        region_latency_s=wan.latency_s,
        region_bandwidth_mb_s=wan.mbit_s / 8,
        compute=compute,
        direct_latency_s=0.0005,
        cold_start_s=0.5,
    )
    return Job(
        name=workload.model,
        model=Target(target=f"geo_models:{workload.model}", options=workload.options),
        code=(folder / "code",),
        optimizer=Target(target="SGD", options={"lr": workload.lr, "momentum": 0.9}),
        epochs=workload.epochs,
        seed=seed,
        data=DataSpec(source="npz", path=path, options={name: name for name in _ARRAYS}),
        simulation=world,
        limits=JobLimits(),
        evaluate_every=evaluate_every,
    )


def one_cloud(job: Job, workload: Workload, *, functions: int = 4) -> Result:
    """A run in one region: functions of almost six vCPUs each."""
    values = {
        "platform": "simulated",
        "workers": functions,
        "memory_mb": MEMORY_MB,
        "batch_size": workload.batch_size,
        "pattern": "parameter-server",
        "channel": "parameter_server",
        "checkpoint_every": 200,
    }
    return train(job, configure(job, **values)).raise_if_failed()


def regions(job: Job, workload: Workload, *, sync: str, every: int, compression: str = "none", functions: int = 2) -> Result:
    """A run in two regions of equal shares, with functions of almost six vCPUs each."""
    groups = tuple(RunRegion(name=name, workers=functions, memory_mb=MEMORY_MB, share=1.0) for name in ("shanghai", "chongqing"))
    values = {
        "platform": "simulated",
        "regions": {"region": groups, "sync": sync, "exchange_every": every, "compression": compression},
        "batch_size": workload.batch_size,
        "checkpoint_every": 200,
        "channel": "memory",
    }
    return train(job, configure(job, **values)).raise_if_failed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Accuracy after an epoch, with what it has taken until then."""

    accuracy: float
    seconds: float
    """Of the region that is last; its evaluations are left out."""
    wan_bytes: int
    """Sent by the region that has sent most."""


def curve(result: Result, *, evaluation_s: float = 0.0) -> list[Point]:
    """Accuracy, seconds since the first function began, and bytes after each evaluation; regions count alike.

    Args:
        result: of a run.
        evaluation_s: virtual seconds of one evaluation, which are subtracted.
    """
    sums: dict[int, dict[int, tuple[float, float]]] = {}
    times: dict[int, float] = {}
    traffic: list[tuple[int, int, int]] = []
    sent: dict[int, int] = {}
    for event in events_of(result.folder):
        if isinstance(event, Evaluated) and event.sums.get("accuracy"):
            sums.setdefault(event.iteration, {})[event.rank] = event.sums["accuracy"]  # type: ignore[assignment]
            times[event.iteration] = max(times.get(event.iteration, 0.0), event.t)
        elif isinstance(event, RegionExchanged):
            sent[event.rank] = sent.get(event.rank, 0) + event.bytes_sent
            traffic.append((event.iteration, event.rank, sent[event.rank]))
    found = []
    for number, (iteration, ranks) in enumerate(sorted(sums.items()), start=1):
        right, of = (sum(pair[i] for pair in ranks.values()) for i in (0, 1))
        nbytes = max((total for at, _, total in traffic if at <= iteration), default=0)
        seconds = times[iteration] - number * evaluation_s
        found.append(Point(accuracy=right / of, seconds=seconds, wan_bytes=nbytes))
    return found


def in_processes(function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> Iterator[T]:
    """Results of calls in their order, one process for each core of this machine: virtual time does not depend on its load.

    Args:
        function: of a module.
        calls: arguments of each.
    """
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(function, *call) for call in calls]:
            yield future.result()


def waited_s(result: Result) -> float:
    """Seconds in which the regions have waited for exchanges, on average."""
    events = [e for e in events_of(result.folder) if isinstance(e, RegionExchanged)]
    return sum(e.seconds for e in events) / max(1, len({e.rank for e in events}))


def as_json(point: Point | None) -> dict[str, Any] | None:
    """Plain values."""
    return None if point is None else dataclasses.asdict(point)
