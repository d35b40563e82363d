"""Coefficients of a workload and of a platform, read from and written to `profile.json`.

`profile.json` can be written by hand, in the symbols of FasDL's tables 3.1 and 5.1:

    {"workload": {"model_mb": 97.49, "a": 37.19, "b": 12.48, "m": -111.46, "memory_slope_mb": 12, "memory_base_mb": 700,
                  "dataset_mb": 147, "samples": 50000},
     "platform": {"name": "aws-lambda", "memory_mb": {"min": 128, "max": 10240, "step": 128}, "lifetime_s": 900,
                  "cold_start_s": 3, "price_gb_s": 1.66667e-5, "price_invocation": 2e-7, "price_put": 5e-6,
                  "price_get": 4e-7, "poll_s": 0.02,
                  "transfer": [{"memory_mb": 1024, "up": {"p_mb_s": 73, "t_per_mb": 0.11},
                                "down": {"p_mb_s": 82, "t_per_mb": 0.35}}]}}

`rates` lists the four forms that `up` and `down` may have. MB are 1e6 bytes for data and MiB for memory quotas, as clouds
sell them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from ephemeron.config import typed
from ephemeron.config.typed import AtLeast, Count, NonNegative, Positive
from ephemeron.errors import JobError
from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.planner.model.provenance import Provenance
from ephemeron.training.planner.model.rates import Array, Direction, Transfer
from ephemeron.training.planner.model.transfer_curves import transfer_curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model on one dataset."""

    name: str = "workload"
    model_mb: Positive
    """S_m: MB of the exchanged vector."""
    a: Positive
    """Seconds·MB per sample: seconds of an iteration are a·(B+b)/(M+m), FasDL equation 3-12."""
    b: NonNegative
    m: Annotated[float, AtLeast(-1e9)]
    memory_slope_mb: NonNegative
    """k of equation 4-1, MB per sample of a batch."""
    memory_base_mb: NonNegative
    """c of equation 4-1."""
    dataset_mb: NonNegative
    samples: Count
    """D."""
    test_samples: Annotated[int, AtLeast(0)] = 0
    """Evaluated after every epoch, all functions sharing; a forward pass costs a third of a step."""
    state_mb: NonNegative = 0.0
    """MB of a checkpoint (parameters, buffers, optimiser); 0: as `model_mb`."""
    vcpus: NonNegative = 0.0
    """Share of the CPU above which more brings nothing (one thread per function: 1); 0: no such share."""
    fold_s_per_mb: NonNegative = 0.0
    """CPU seconds, on one whole vCPU, to unpack one MB and add it up, or to pack it."""
    apply_s: NonNegative = 0.0
    """CPU seconds, on one whole vCPU, of the optimiser's step."""
    step_s: NonNegative = 0.0
    """Seconds of an iteration that neither batch nor memory explains, the same at every quota."""
    lockstep_cpu_s: NonNegative = 0.0
    """CPU seconds, on one whole vCPU, by which an iteration of functions in lockstep takes longer than its parts: steps
    scatter and all wait for the slowest, polls are late, and bookkeeping takes CPU time of the share."""
    direct_lockstep_cpu_s: NonNegative | None = None
    """The same of functions with direct links; None: as over a store."""
    local_steps: Count = 1
    """Batches of an iteration, which `a` and `samples` count as one: see `with_local_steps`."""
    first_cpu_s: NonNegative = 0.0
    """CPU seconds, on one whole vCPU, once per invocation: building the model, first allocations."""

    def with_local_steps(self, steps: int) -> Workload:
        """The same work with `steps` batches and optimiser steps between two exchanges.

        An iteration of it takes the time of as many batches, and there are as many times fewer. The parameters before the steps, and
        the momentum of an outer optimiser, need memory.
        """
        if steps == 1:
            return self
        return replace(
            self,
            a=self.a * steps,
            samples=-(-self.samples // steps),
            apply_s=self.apply_s * (steps + 1),
            memory_base_mb=self.memory_base_mb + 2 * self.model_mb,
            local_steps=steps,
        )

    def lockstep_s(self, platform: PlatformProfile) -> float:
        """CPU seconds, on one whole vCPU, by which an iteration in lockstep takes longer over a platform's channel."""
        direct = None if platform.direct is None else self.direct_lockstep_cpu_s
        return self.lockstep_cpu_s if direct is None else direct

    def compute_s(self, batch: Array | float, memory_mb: Array | float) -> Array:
        """FasDL, equation 3-12."""
        share = np.asarray(memory_mb) + self.m
        return np.where(share > 0, self.a * (np.asarray(batch) + self.b) / np.maximum(share, 1e-9), np.inf)

    def evaluation_s(self, samples: Array | float, memory_mb: Array | float) -> Array:
        """Seconds of forward passes over so many samples: a third of a training step's."""
        return self.compute_s(np.asarray(samples) / 3, memory_mb) / self.local_steps

    def memory_needed_mb(self, batch: Array | float) -> Array:
        """FasDL, equation 4-1."""
        return self.memory_slope_mb * np.asarray(batch) + self.memory_base_mb

    def largest_batch(self, memory_mb: Array | float) -> Array:
        """FasDL, equation 4-2, rounded down; 0 where not even the base fits."""
        free = np.asarray(memory_mb, dtype=float) - self.memory_base_mb
        if self.memory_slope_mb <= 1e-6:
            return np.where(free >= 0, float(self.samples), 0.0)
        return np.maximum(np.floor(free / self.memory_slope_mb + 1e-9), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRange:
    """Memory quotas that a platform offers, MiB."""

    min: Count = 128
    max: Count = 10240
    step: Count = 128
    sizes: tuple[Count, ...] = ()
    """The only quotas that there are, those of deployed functions; empty: all within the bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformProfile:
    """Functions and one kind of channel between them."""

    name: str
    memory_mb: QuotaRange = field(default_factory=QuotaRange)
    lifetime_s: Positive = 900.0
    cold_start_s: NonNegative = 1.5
    warm_start_s: NonNegative = 0.05
    start_each_s: NonNegative = 0.0
    """Seconds of one machine's time per cold start, for functions that start together on it; 0: they do not share one."""
    price_gb_s: NonNegative
    price_invocation: NonNegative
    price_put: NonNegative = 0.0
    price_get: NonNegative = 0.0
    """Per read; a poll costs one, found or not."""
    price_list: NonNegative = 0.0
    price_delete: NonNegative = 0.0
    price_mb: NonNegative = 0.0
    """Per MB moved, for caches that bill by volume."""
    price_gb_hour: NonNegative = 0.0
    """Per GB kept in the channel for an hour, for caches that bill by it."""
    least_kept_gb: NonNegative = 0.0
    """GB that are billed at least."""
    price_server_hour: NonNegative = 0.0
    poll_s: NonNegative = 0.0
    """Seconds of one request that finds nothing; 0: the store waits by itself, and is not polled."""
    polls_per_get: NonNegative = 0.12
    """Requests that find nothing, per read, where stores have to be polled."""
    channel: Literal["objects", "cache", "server", "direct"] = "objects"
    """Kind of channel; `direct`: links between functions, and a store beside them, which all other coefficients are of."""
    links: DirectLinks | None = None
    """Direct links, where functions can have them."""
    concurrency: Count = 1000
    """Functions that may run at once."""
    burst: Annotated[int, AtLeast(0)] = 0
    """Functions that may start at once, and as many more every `burst_s`, refilled evenly; 0: no such limit."""
    burst_s: NonNegative = 0.0
    mb_per_vcpu: Positive = 1769.0
    total_memory_mb: NonNegative = 0.0
    """Sum of all functions' quotas up to which each gets its CPU share (one machine has only so many cores); 0: any."""
    parallel: Count = 64
    """Requests that one function can keep under way; the collectives may keep fewer."""
    server_mb_s: NonNegative = 0.0
    """MB/s in each direction of a parameter server's link, which all functions share; 0: no limit of its own."""
    transfer: tuple[Transfer, ...]
    measured_mb: NonNegative = 0.0
    """Largest object whose transfer was measured; 0: not known, the rates are taken to hold at any size."""
    error_up: NonNegative = 0.0
    """Mean relative error of uploads that were kept out of the fit; 0: not known. `error_down` is that of downloads."""
    error_down: NonNegative = 0.0
    source: str = ""
    as_of: str = ""
    """ISO date of the prices."""
    notes: tuple[str, ...] = ()

    @property
    def direct(self) -> DirectLinks | None:
        """The links through which functions exchange, if they do."""
        return self.links if self.channel == "direct" else None

    @property
    def service(self) -> str:
        """Kind of the store, for its prices."""
        return self.channel if self.direct is None else self.direct.store

    def over_links(self) -> PlatformProfile | None:
        """The same functions with their direct links as the channel; None: they have none."""
        if self.links is None or self.channel not in ("objects", "cache"):
            return None
        return replace(self, channel="direct", links=replace(self.links, store=self.channel))

    def of_sizes(self, sizes_mb: Sequence[int]) -> PlatformProfile:
        """The platform with functions of these memory sizes only; none: as it is."""
        if not sizes_mb:
            return self
        range_mb = replace(self.memory_mb, min=min(sizes_mb), max=max(sizes_mb), sizes=tuple(sizes_mb))
        return replace(self, memory_mb=range_mb)

    def start_s(self, workers: Array | float) -> Array:
        """Seconds from the launch until the last of so many functions begins: cold start, and its turn in the burst."""
        w = np.asarray(workers, dtype=float)
        start = np.maximum(self.cold_start_s, w * self.start_each_s)
        return np.asarray(start + np.maximum(w - self.burst, 0.0) * self.burst_s / self.burst if self.burst else start)

    def quotas(self, step_mb: int | None = None) -> Array:
        """All memory quotas, ascending; every `step_mb`, where they are not those of deployed functions."""
        quota = self.memory_mb
        if quota.sizes:
            return np.unique(np.array(quota.sizes))
        step = step_mb or quota.step
        first = -(-quota.min // step) * step
        return np.unique(np.append(np.arange(first, quota.max + 1, step), quota.max))

    def seconds(self, direction: Direction, size_mb: Array | float, memory_mb: Array | float) -> Array:
        """One object alone.

        Args:
            direction: which way.
            size_mb: any shape.
            memory_mb: broadcastable to it.

        Returns:
            Seconds, interpolated linearly between measured quotas, constant beyond them; of larger objects than were
            measured, the rest at the bandwidth of the largest one that was.
        """
        size, memory = np.asarray(size_mb, dtype=float), np.asarray(memory_mb, dtype=float)
        if not self.measured_mb or not size.size or size.max() <= self.measured_mb:
            return self._measured(direction, size, memory)
        largest = np.asarray(self.measured_mb)
        at_largest, latency = (self._measured(direction, np.asarray(x), memory) for x in (self.measured_mb, 0.0))
        beyond = np.maximum(size - largest, 0.0) * (at_largest - latency) / largest
        return np.asarray(self._measured(direction, np.minimum(size, largest), memory) + beyond)

    def _measured(self, direction: Direction, size: Array, memory: Array) -> Array:
        return transfer_curves(self.transfer)[direction].seconds(size, memory)

    def seconds_per_mb(self, direction: Direction, memory_mb: Array | float) -> Array:
        """Seconds per MB of many objects at once: the link's own limit."""
        return transfer_curves(self.transfer)[direction].seconds_per_mb(np.asarray(memory_mb, dtype=float))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Workload and platform that a plan starts from."""

    workload: Workload
    platform: PlatformProfile
    fit: Provenance = field(default_factory=Provenance)
    """Provenance of the coefficients."""

    def to_json(self) -> str:
        """Text of `profile.json`."""
        out = typed.plain(self)
        if self.fit == Provenance():
            del out["fit"]
        return json.dumps(out, indent=2) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.to_json())


def load_profile(path: str | Path) -> Profile:
    """Reads `profile.json`.

    Raises:
        JobError: absent, not JSON, or a value is missing, unknown or out of bounds; names it.
    """
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as e:
        raise JobError(f"profile {path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise JobError(f"profile {path} is not JSON: {e}") from None
    return parse_profile(raw, where=str(path))


def parse_profile(raw: object, *, where: str = "profile") -> Profile:
    """A profile from parsed JSON.

    Raises:
        JobError: names the value, its place and its bound.
    """
    if isinstance(raw, Mapping) and str(raw.get("format", "")).startswith("ephemeron sparse profile"):
        raise JobError(f"{where} is the profile of a sparse job", remedy="give the job, too: ephemeron plan JOB --profile FILE")
    if isinstance(raw, Mapping) and "platform" in raw:
        raw = {**raw, "platform": parse_platform(raw["platform"], where=f"{where}: platform")}
    return typed.build(Profile, raw, where=where)


REQUIRED = ("lifetime_s", "cold_start_s", "price_put", "price_get", "poll_s", "memory_mb")
"""Keys that a platform's document gives though the dataclass has a default: a wrong guess would change every plan."""


def parse_platform(raw: object, *, where: str) -> PlatformProfile:
    """The `platform` table, transfers by ascending quota.

    Raises:
        JobError: names the value, its place and its bound.
    """
    found = typed.build(PlatformProfile, raw, where=where)
    assert isinstance(raw, Mapping)
    for key in REQUIRED:
        if key not in raw:
            raise JobError(f"{where}: missing key {key}")
    if found.channel == "direct" and found.links is None:
        raise JobError(f"{where}: missing key links, which channel 'direct' needs")
    if found.memory_mb.min > found.memory_mb.max:
        raise JobError(f"{where}: memory_mb = {typed.plain(found.memory_mb)} should have min ≤ max")
    nodes = [t.memory_mb for t in found.transfer]
    if not nodes:
        raise JobError(f"{where}: transfer should be a list of at least one measured quota")
    if len(set(nodes)) < len(nodes):
        raise JobError(f"{where}: transfer has two rows of the same memory_mb")
    return replace(found, transfer=tuple(sorted(found.transfer, key=lambda t: t.memory_mb)))
