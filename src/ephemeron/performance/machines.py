"""The same job as one process on a virtual machine: what functions have to be cheaper or faster than.

A plan that only compares functions with functions cannot say that functions are the wrong tool. This can: one
machine needs no exchange of gradients, so its time is loading and computing. At list prices a vCPU of AWS Lambda costs
2.3 times one of a c7i machine, so functions win on money only where the machine would mostly boot or stand idle; they
win on time because there can be hundreds of them.

It reuses the workload's FasDL coefficients: a machine of n vCPUs is taken for one function with the quota that brings
n vCPUs (n × `mb_per_vcpu`). That is **optimistic for the machine** in four ways:

- threads scale perfectly up to the machine's vCPUs, or up to `Workload.vcpus` where that is known; equation 3-12 was
  fitted over the quotas of functions and is extrapolated beyond them;
- nothing shares the machine, and memory bandwidth is no limit;
- the machine is there at once, boots in `boot_s`, and is given back when the job ends;
- setting it up, its disk and its data transfer cost nothing.

and **pessimistic** in one: a vCPU of a newer family is faster than the one that was measured. Read a difference below
some 30 % as a tie.
"""

from __future__ import annotations

from typing import Any

from ephemeron.performance.profile import Workload
from ephemeron.prices import Machine

BILLED_AT_LEAST_S = 60.0
"""Machines are billed by the second, after the first minute."""


def on_machine(
    workload: Workload, machine: Machine, *, epochs: int, batch: int, mb_per_vcpu: float, download_s: float
) -> dict[str, Any]:
    """Time and cost of the whole job.

    Args:
        workload: what was measured on functions.
        machine: from the price file.
        epochs: passes over the training set.
        batch: samples per iteration; to learn the same as W functions, their global batch.
        mb_per_vcpu: memory quota that brings one vCPU on the platform that was measured.
        download_s: seconds to fetch code and data.

    Returns:
        `name`; `seconds` from the request to the end; `cost_usd`; `fits`: by FasDL equation 4-1, a process with
        this batch fits the machine's memory.
    """
    vcpus = min(machine.vcpus, workload.vcpus) if workload.vcpus > 0 else machine.vcpus
    quota_mb = vcpus * mb_per_vcpu
    batch = min(batch, workload.samples)
    full, rest = divmod(workload.samples, batch)
    epoch_s = full * float(workload.compute_s(batch, quota_mb))
    if rest:
        epoch_s += float(workload.compute_s(rest, quota_mb))
    epoch_s += (full + bool(rest)) * (workload.step_s + workload.apply_s / vcpus)
    if workload.test_samples:
        epoch_s += float(workload.compute_s(workload.test_samples / 3, quota_mb))
    seconds = machine.boot_s + download_s + epochs * epoch_s
    return {
        "name": machine.name,
        "seconds": seconds,
        "cost_usd": max(seconds, BILLED_AT_LEAST_S) * machine.hour_usd / 3600,
        "fits": bool(workload.memory_needed_mb(batch) <= machine.memory_mb),
    }
