"""Runs of two regions with given devices and parts of the data, for the figures about plans: simulated time, real gradients.

A function has two cores, as the smallest device of table 1 of Cloudless-Training. An iteration of a function takes `Workload.iteration_s` on Cascade Lake and
is so much shorter on faster cores. Costs are counted twice: as metered (AWS prices, functions and storage), and as the paper counts them (table 3), the
time of training for every core.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.geo_worlds import Wan, Workload, job_of
from ephemeron.events import Progress, RegionExchanged
from ephemeron.regions.region_files import Regions, parse_regions
from ephemeron.regions.scheduling.devices import KINDS
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.job import RunRegion

CORES, FUNCTION_MB = 2, 3538
"""Of a function: two vCPUs of AWS Lambda."""
AVAILABLE = 12
"""Cores that each region has."""
WORKLOADS = {
    "lenet": Workload(model="lenet", samples=960, test=300, epochs=6, lr=0.02, iteration_s=0.295, batch_size=8),
    "resnet": Workload(model="resnet", samples=960, test=300, epochs=4, lr=0.05, iteration_s=0.51, batch_size=8),
    "deepfm": Workload(model="deepfm", samples=960, test=300, epochs=3, lr=0.02, iteration_s=0.345, batch_size=8),
}
"""Iteration times are those of `geo_communication`, which follow from the speed-ups of the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Devices and data of Shanghai and Chongqing."""

    shares: tuple[int, int]
    kinds: tuple[str, str]

    @property
    def title(self) -> str:
        """Such as `1:1 cascade-lake/skylake`."""
        return f"{self.shares[0]}:{self.shares[1]} {self.kinds[0]}/{self.kinds[1]}"

    def regions(self) -> Regions:
        """The regions with all that they have."""
        return parse_regions(
            "\n".join(
                f'[[region]]\nname = "{name}"\nplatform = "simulated"\ndata_share = {share}\n'
                f'devices = [{{ kind = "{kind}", cores = {AVAILABLE} }}]\n'
                for name, share, kind in zip(("shanghai", "chongqing"), self.shares, self.kinds, strict=True)
            )
        )


def trained(
    folder: Path, workload: Workload, allocation: Allocation, cores: tuple[int, ...], *, sync: str = "sma", every: int = 10, seed: int = 0
) -> dict[str, Any]:
    """One run with so many cores in each region.

    Returns:
        Seconds of training; by region its waiting share; seconds for which cores wait; core hours; metered cost; accuracy.
    """
    job = job_of(folder, workload, seed, Wan(), evaluate_every=f"{workload.epochs} epochs")
    slow = KINDS["cascade-lake"].power()
    compute: Any = dataclasses.replace(job.simulation.compute, a=workload.iteration_s * slow * FUNCTION_MB / workload.batch_size)
    job = dataclasses.replace(job, simulation=dataclasses.replace(job.simulation, compute=compute))
    groups = tuple(
        RunRegion(name=name, workers=n // CORES, memory_mb=FUNCTION_MB, share=share, power=KINDS[kind].power())
        for name, n, share, kind in zip(("shanghai", "chongqing"), cores, allocation.shares, allocation.kinds, strict=True)
    )
    configuration = configure(
        job,
        platform="simulated",
        regions={"region": groups, "sync": sync, "exchange_every": every},
        batch_size=workload.batch_size,
        checkpoint_every=200,
        channel="memory",
    )
    result = train(job, configuration).raise_if_failed()
    events = list(events_of(result.folder))
    ends = [max(e.t for e in events if isinstance(e, Progress) and e.rank in ranks) for ranks in _ranks(groups)]
    begins = min(start for e in events if isinstance(e, Progress) for _, start, _ in e.spans)
    waited = [sum(e.seconds for e in events if isinstance(e, RegionExchanged) and e.rank in ranks) for ranks in _ranks(groups)]
    seconds = max(ends) - begins
    return {
        "cores": list(cores),
        "seconds": round(seconds, 2),
        "waiting_share": [round(w / seconds, 4) for w in waited],
        "waiting_core_s": round(sum(w * n for w, n in zip(waited, cores, strict=True)), 2),
        "core_hours": round(sum(cores) * seconds / 3600, 4),
        "cost_usd": round(result.summary.cost_usd, 6),
        "accuracy": round(result.summary.metrics["accuracy"] or 0.0, 4),
    }


def _ranks(groups: tuple[RunRegion, ...]) -> list[range]:
    found, first = [], 0
    for group in groups:
        found.append(range(first, first + group.workers))
        first += group.workers
    return found
