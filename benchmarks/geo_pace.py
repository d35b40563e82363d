"""Regions of unequal speed, simulated: what three regions at speed 1:2:4 keep of the throughput that they have alone.

With equal parts of the data the fast regions wait. With the parts of `scheduling.replanning.shares`, from iteration times that were measured alone, and with
exchanges at the same parts of a pass, they do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.geo_worlds import MEMORY_MB, Wan, Workload, job_of, workplace
from ephemeron.events import Progress, RegionExchanged
from ephemeron.runs.folders import events_of
from ephemeron.training.driver import configure, train
from ephemeron.training.driver.result import Result
from ephemeron.training.job import Job, RunRegion

POWERS = (1.0, 2.0, 4.0)
WORKLOAD = Workload(model="lenet", samples=1120, test=300, epochs=4, lr=0.02, iteration_s=0.6, batch_size=8)
POLICIES = {"sma": ("sma", "none"), "diloco int4": ("diloco:momentum=0.5", "int4"), "asgd-ga": ("asgd-ga", "none")}


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Throughput alone, and together by policy and shares."""
    with workplace() as folder:
        job = job_of(folder, WORKLOAD, 0, Wan(), evaluate_every=f"{WORKLOAD.epochs} epochs")
        alone = [_alone(job, power) for power in POWERS]
        say(f"alone: {[round(rate, 1) for rate in alone]} samples/s, {sum(alone):.1f} together")
        rows = []
        for name, (sync, compression) in list(POLICIES.items())[: 1 if quick else None]:
            for what, shares in (("equal", (1.0, 1.0, 1.0)), ("by measured speed", tuple(alone))):
                rows.append(_together(job, sync, compression, shares) | {"policy": name, "shares": what})
                kept = rows[-1]["samples_per_s"] / sum(alone)
                rows[-1]["kept_percent"] = round(100 * kept, 1)
                say(
                    f"{name}, shares {what}: {rows[-1]['kept_percent']} % of the summed throughput; waiting {rows[-1]['waiting_percent']} %"
                )
    return {"simulated": True, "powers": POWERS, "alone_samples_per_s": [round(rate, 2) for rate in alone], "rows": rows}


def _alone(job: Job, power: float) -> float:
    """Samples a second of a region that trains by itself."""
    compute: Any = job.simulation.compute
    faster = dataclasses.replace(job.simulation, compute=dataclasses.replace(compute, a=compute.a / power))
    c = configure(job, platform="simulated", workers=2, memory_mb=MEMORY_MB, batch_size=WORKLOAD.batch_size, channel="memory")
    result = train(dataclasses.replace(job, epochs=1, simulation=faster), c).raise_if_failed()
    return _samples(result) / _seconds(result)


def _together(job: Job, sync: str, compression: str, shares: Sequence[float]) -> dict[str, Any]:
    groups = tuple(
        RunRegion(name=f"speed{power:g}", workers=2, memory_mb=MEMORY_MB, share=share, power=power)
        for power, share in zip(POWERS, shares, strict=True)
    )
    c = configure(
        job,
        platform="simulated",
        regions={"region": groups, "sync": sync, "compression": compression, "exchange_every": 10},
        batch_size=WORKLOAD.batch_size,
        checkpoint_every=200,
        channel="memory",
    )
    result = train(job, c).raise_if_failed()
    seconds = _seconds(result)
    waited = [0.0] * len(groups)
    for event in events_of(result.folder):
        if isinstance(event, RegionExchanged):
            waited[event.rank // 2] += event.seconds
    return {
        "samples_per_s": round(_samples(result) / seconds, 2),
        "seconds": round(seconds, 2),
        "waiting_percent": [round(100 * each / seconds, 1) for each in waited],
        "accuracy": round(result.summary.metrics["accuracy"] or 0.0, 4),
    }


def _seconds(result: Result) -> float:
    """From the first step to the last one of all regions."""
    progress = [e for e in events_of(result.folder) if isinstance(e, Progress)]
    return max(e.t for e in progress) - min(start for e in progress for _, start, _ in e.spans)


def _samples(result: Result) -> int:
    return sum(e.samples for e in events_of(result.folder) if isinstance(e, Progress))
