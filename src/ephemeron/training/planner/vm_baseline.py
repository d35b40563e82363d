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

from collections.abc import Sequence

import numpy as np

from ephemeron.prices import Machine
from ephemeron.training.planner.model.profile import Workload
from ephemeron.training.planner.plan import MachineEstimate

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
