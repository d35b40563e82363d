"""Estimate of a job as one process on a virtual machine, to compare functions with.

A plan that only compares functions with functions cannot say that functions are the wrong tool. This can: one
machine needs no exchange of gradients, so its time is loading and computing. At list prices a vCPU of AWS Lambda costs
2.3 times one of a c7i machine, so functions win on money only where the machine would mostly boot or be idle; they
win on time because there can be hundreds of them.

It reuses the workload's FasDL coefficients: a machine of n vCPUs is taken for one function with the quota that brings
n vCPUs (n × `mb_per_vcpu`). That is **optimistic for the machine** in four ways:

- threads scale perfectly up to the machine's vCPUs; equation 3-12 was fitted over the quotas of functions and is
  extrapolated beyond them;
- nothing shares the machine, and memory bandwidth is no limit;
- the machine is there at once, boots in `boot_s`, and is given back when the job ends;
- setting it up, its disk and its data transfer cost nothing.

and **pessimistic** in two: a vCPU of a newer family is faster than the one that was measured; and where
`Workload.vcpus` is known, no more vCPUs than that are counted, though a process on a machine may well use them
(`counted_vcpus` of a comparison says how many were). Read a difference below some 30 % as a tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ephemeron.prices import Gpu, Machine, load_beyond, load_gpus, load_rented
from ephemeron.training.planner.model.profile import Workload
from ephemeron.training.planner.plan import Choice, GpuEstimate, MachineEstimate, PlanLimits
from ephemeron.training.planner.search.pareto import Candidate
from ephemeron.units import MB

BILLED_AT_LEAST_S = 60.0
"""Machines are billed by the second, after the first minute."""


def on_machine(workload: Workload, machine: Machine, *, epochs: int, batch: int, mb_per_vcpu: float, download_s: float) -> MachineEstimate:
    """Time and cost of the whole job.

    Args:
        workload: what was measured on functions.
        machine: from the price file.
        epochs: passes over the training set.
        batch: samples per iteration; to learn the same as W functions, their global batch.
        mb_per_vcpu: memory quota that brings one vCPU on the platform that was measured.
        download_s: seconds to fetch code and data.

    """
    vcpus = min(machine.vcpus, workload.vcpus) if workload.vcpus > 0 else machine.vcpus
    quota_mb = vcpus * mb_per_vcpu
    batch = min(batch, workload.samples)
    full, rest = divmod(workload.samples, batch)
    full_s, rest_s = workload.compute_s(np.array([batch, rest]), quota_mb).tolist()
    test_s = float(workload.evaluation_s(workload.test_samples, quota_mb))
    epoch_s = full * full_s + (rest_s if rest else 0.0) + (test_s if workload.test_samples else 0.0)
    epoch_s += (full + bool(rest)) * (workload.step_s + workload.apply_s / vcpus)
    seconds = machine.boot_s + download_s + epochs * epoch_s
    return MachineEstimate(
        name=machine.name,
        seconds=seconds,
        cost_usd=max(seconds, BILLED_AT_LEAST_S) * machine.hour_usd / 3600,
        fits=bool(workload.memory_needed_mb(batch) <= machine.memory_mb),
        vcpus=machine.vcpus,
        counted_vcpus=vcpus,
        kind=machine.kind,
        arm64=machine.arm64,
        verified=machine.verified,
        as_of=machine.as_of,
    )


def without_uncounted(rows: Sequence[MachineEstimate]) -> list[MachineEstimate]:
    """Comparisons without machines that differ from a cheaper one only in vCPUs that were not measured.

    Such a machine would be shown as slow as the cheaper one of its kind, which says nothing about it.

    Args:
        rows: results of `on_machine` that fit.
    """
    return [
        r
        for r in rows
        if r.vcpus <= r.counted_vcpus
        or not any(o.cost_usd < r.cost_usd and o.seconds <= r.seconds for o in rows if (o.kind, o.arm64) == (r.kind, r.arm64))
    ]


def uncounted_words(rows: Sequence[MachineEstimate]) -> str:
    """The sentence shown beside estimates in which vCPUs are not counted; empty where all are."""
    counted = [r.counted_vcpus for r in rows if r.counted_vcpus < r.vcpus]
    if not counted:
        return ""
    return (
        f"At most {max(counted):g} vCPU{'s' if max(counted) != 1 else ''} counted, as measured on functions: a process that "
        "uses more threads would be faster than this on a machine. Larger ones are left out."
    )


# -- estimates of the same job on machines ------------------------------------------------------------------------


GB = 1e9


def on_all(workload: Workload, best: Candidate, *, epochs: int, file: str | Path | None) -> list[MachineEstimate]:
    """The job on every machine and container that it fits, cheapest first."""
    platform = best.option.platform
    batch = best.batch * best.aggregators + best.other_batch * (best.workers - best.aggregators)
    found = [
        on_machine(workload, m, epochs=epochs, batch=batch, mb_per_vcpu=platform.mb_per_vcpu, download_s=_download_s(workload, best))
        for m in load_rented(file)
    ]
    fitting = without_uncounted([m for m in found if m.fits])
    return sorted(fitting, key=lambda m: (m.cost_usd, m.seconds))


def few(rows: Sequence[MachineEstimate], limits: PlanLimits) -> list[MachineEstimate]:
    """At most six to show: the cheapest of each kind, the cheapest within the limits, the fastest. Cheapest first.

    Args:
        rows: of `on_all`.
        limits: the user's.
    """
    kinds = (
        [r for r in rows if r.kind == "on demand" and not r.arm64],
        [r for r in rows if r.kind == "on demand" and r.arm64],
        [r for r in rows if r.kind == "spot"],
        [r for r in rows if r.kind == "fargate"],
        [r for r in rows if r.seconds <= limits.seconds and r.cost_usd <= limits.usd],
        sorted(rows, key=lambda r: (r.seconds, r.kind != "on demand", r.cost_usd)),
    )
    names = {kind[0].name for kind in kinds if kind}
    return [r for r in rows if r.name in names]


def gpus(workload: Workload, best: Candidate, choice: Choice, *, epochs: int, file: str | Path | None) -> list[GpuEstimate]:
    """Speeds from which a machine with a GPU costs less than the plan."""
    vcpu = Machine(name="", vcpus=1, memory_mb=math.inf, hour_usd=0.0, boot_s=0.0, source="", as_of="")
    batch = best.batch * best.aggregators + best.other_batch * (best.workers - best.aggregators)
    one = on_machine(workload, vcpu, epochs=epochs, batch=batch, mb_per_vcpu=best.option.platform.mb_per_vcpu, download_s=0.0).seconds
    download_s = _download_s(workload, best)
    return [_on_gpu(g, one, download_s, choice.predicted.cost_usd) for g in load_gpus(file)]


def _on_gpu(gpu: Gpu, vcpu_s: float, download_s: float, plan_usd: float) -> GpuEstimate:
    affords_s = plan_usd / gpu.hour_usd * 3600
    left_s = affords_s - gpu.boot_s - download_s
    seconds = None if gpu.speedup is None else gpu.boot_s + download_s + vcpu_s / gpu.speedup
    return GpuEstimate(
        name=gpu.name,
        hour_usd=gpu.hour_usd,
        verified=gpu.verified,
        as_of=gpu.as_of,
        break_even=vcpu_s / left_s if left_s > 0 and affords_s >= BILLED_AT_LEAST_S else None,
        seconds=seconds,
        cost_usd=None if seconds is None else max(seconds, BILLED_AT_LEAST_S) * gpu.hour_usd / 3600,
    )


def beyond(workload: Workload, best: Candidate, choice: Choice, *, file: str | Path | None) -> dict[str, float]:
    """Costs beside the plan's, in US dollars, as far as the price file has prices for them.

    Returns:
        `arm64_usd`: the whole plan on arm64 functions, if they take as long. `egress_usd`: one copy of the model out of
        the cloud.
    """
    prices = load_beyond(file)
    p = choice.predicted
    found = {}
    paid = best.option.platform.price_gb_s
    if prices.arm64_gb_second_usd and prices.gb_second_usd and math.isclose(paid, prices.gb_second_usd, rel_tol=1e-3):
        found["arm64_usd"] = p.cost_usd - p.cost["functions"] * (1 - prices.arm64_gb_second_usd / paid)
    if prices.egress_gb_usd:
        found["egress_usd"] = workload.model_mb * MB / GB * prices.egress_gb_usd
    return found


def sentences(found_gpus: Sequence[GpuEstimate], found_beyond: Mapping[str, float], plan_usd: float) -> list[str]:
    """The GPUs and the other prices, in at most three lines."""
    lines = []
    if "arm64_usd" in found_beyond:
        lines.append(f"arm64 functions: ${found_beyond['arm64_usd']:.4g} instead of ${plan_usd:.4g}, the same time assumed, not measured")
    if found_gpus:
        unknown = any(g.cost_usd is None and g.break_even is not None for g in found_gpus)
        words = "; ".join(map(_gpu_words, found_gpus)) + ("; how fast it is on this job is not known" if unknown else "")
        lines.append(f"a GPU costs less than the plan {words}")
    if "egress_usd" in found_beyond:
        lines.append(f"each copy of the model that leaves the cloud: ${found_beyond['egress_usd']:.2g}, once the free volume is used")
    return lines


def _gpu_words(g: GpuEstimate) -> str:
    price = f"{g.name}, ${g.hour_usd:.4g} an hour" + ("" if g.verified else ", not verified")
    if g.break_even is None:
        return f"at no speed ({price})"
    told = f"if {g.break_even:.3g} times as fast as one vCPU ({price})"
    if g.cost_usd is None:
        return told
    return told + f", ${g.cost_usd:.4g} at the speed that the price file says"


def _download_s(workload: Workload, best: Candidate) -> float:
    return float(best.option.platform.seconds("down", workload.dataset_mb + workload.model_mb, float(best.memory_mb)))
