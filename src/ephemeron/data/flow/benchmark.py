"""Benchmark of a flow: some batches, timed by stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ephemeron.data.flow.epoch import FlowCounters
from ephemeron.data.flow.view import Flow, LocalReader


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowBenchmark:
    """Result of a benchmark of one flow on this machine."""

    flow: str
    batch_size: int
    workers: int
    step_s: float
    seconds: float
    """Time from the second batch on, without starts."""
    samples: int
    """Samples in that time."""
    counters: FlowCounters

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """The diagnosis as JSON, rounded."""
        return {
            "flow": self.flow,
            "batch_size": self.batch_size,
            "workers": self.workers,
            "step_s": self.step_s,
            "samples_per_s": round(self.samples_per_s, 2),
            **self.counters.to_dict(),
        }


def benchmark_flow(
    flow: Flow,
    *,
    batch_size: int = 64,
    batches: int = 20,
    workers: int = 0,
    step_s: float = 0.0,
    on_error: str = "fail",
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> FlowBenchmark:
    """Reads some batches as a trainer would.

    Args:
        flow: a flow with a dataset.
        batch_size: samples per batch.
        batches: number of batches, at most an epoch.
        workers: loader processes.
        step_s: seconds that the trainer takes for a batch; 0: it only reads.
        on_error, collate_fn: as in `to_shuffled`.

    Raises:
        JobError, SampleFailed, DatasetError: raised by reading the flow.
    """
    read = flow.prepare_read(LocalReader(workers))
    samples, first = 0, time.perf_counter()
    with read.to_shuffled(batch_size, collate_fn, on_error=on_error) as shuffled:
        for number, _ in enumerate(itertools.islice(shuffled, batches)):
            if number == 0:
                first = time.perf_counter()
                before = shuffled.counters.samples
            time.sleep(step_s)  # the trainer's own work
        counters = shuffled.counters
        samples = counters.samples - (before if counters.batches else 0)
    return FlowBenchmark(
        flow=f"{flow.name}@{flow.version}",
        batch_size=batch_size,
        workers=workers,
        step_s=step_s,
        seconds=time.perf_counter() - first,
        samples=samples,
        counters=counters,
    )
