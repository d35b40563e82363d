"""What was measured: a workload's and a platform's coefficients, as values that travel as JSON.

`profile.json` can be written by hand, in the symbols of FasDL's tables 3.1 and 5.1:

    {"workload": {"model_mb": 97.49, "a": 37.19, "b": 12.48, "m": -111.46, "memory_slope_mb": 12, "memory_base_mb": 700,
                  "dataset_mb": 147, "samples": 50000},
     "platform": {"name": "aws-lambda", "memory_mb": {"min": 128, "max": 10240, "step": 128}, "lifetime_s": 900,
                  "cold_start_s": 3, "price_gb_s": 1.66667e-5, "price_invocation": 2e-7, "price_put": 5e-6,
                  "price_get": 4e-7, "poll_s": 0.02,
                  "transfer": [{"memory_mb": 1024, "up": {"p_mb_s": 73, "t_per_mb": 0.11},
                                "down": {"p_mb_s": 82, "t_per_mb": 0.35}}]}}

How long an object of s MB takes one way may have four forms:

    {"p_mb_s", "t_per_mb"}                         s / (p·(1 − exp(−t·s))), FasDL equations 3-5 and 3-6
    {"latency_s", "mb_s"}                          latency + s / bandwidth
    {"latency_s", "s_per_mb", "exponent"}          latency + c·s^γ, which predicts AWS Lambda with S3 better
    {"latency_s", "s_per_mb", "knee_mb", "s_per_mb_beyond"}    latency + two rates, one beyond a size: multipart

MB are 1e6 bytes for data and MiB for memory quotas, as clouds sell them. A quota between two measured ones is
interpolated; above the last measured one nothing gets faster.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ephemeron.errors import JobError

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturating:
    """Throughput p·(1 − exp(−t·s)): FasDL, equations 3-5 and 3-6."""

    p_mb_s: float
    t_per_mb: float

    def seconds(self, size_mb: Array | float) -> Array:
        s = np.maximum(np.asarray(size_mb, dtype=float), 1e-9)
        return np.asarray(s / (self.p_mb_s * -np.expm1(-self.t_per_mb * s)))

    @property
    def bandwidth_mb_s(self) -> float:
        """Of many objects at once."""
        return self.p_mb_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """Latency, then a constant rate."""

    latency_s: float
    mb_s: float

    def seconds(self, size_mb: Array | float) -> Array:
        return np.asarray(self.latency_s + np.asarray(size_mb, dtype=float) / self.mb_s)

    @property
    def bandwidth_mb_s(self) -> float:
        return self.mb_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Latency, then time that grows as a power of the size: some stores serve large objects over more connections."""

    latency_s: float
    s_per_mb: float
    exponent: float

    def seconds(self, size_mb: Array | float) -> Array:
        return np.asarray(self.latency_s + self.s_per_mb * np.asarray(size_mb, dtype=float) ** self.exponent)

    @property
    def bandwidth_mb_s(self) -> float:
        """At the largest size that was measured in earnest, 50 MB."""
        return 50.0 / float(self.s_per_mb * 50.0**self.exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """Latency, then one rate up to a size and another beyond it: clients cut large objects into parts, sent at once."""

    latency_s: float
    s_per_mb: float
    knee_mb: float
    s_per_mb_beyond: float
    """May be 0: beyond the knee, larger objects take no longer."""

    def seconds(self, size_mb: Array | float) -> Array:
        s = np.asarray(size_mb, dtype=float)
        before = np.minimum(s, self.knee_mb)
        return np.asarray(self.latency_s + self.s_per_mb * before + self.s_per_mb_beyond * (s - before))

    @property
    def bandwidth_mb_s(self) -> float:
        """At 50 MB, as with `Power`."""
        return 50.0 / float(self.seconds(50.0) - self.latency_s)


Rate = Saturating | Affine | Power | Knee


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Both directions at one memory quota."""

    memory_mb: float
    up: Rate
    down: Rate


@dataclass(frozen=True, slots=True)
class _Curves:
    """The rates of one direction at all measured quotas, to be evaluated together."""

    rates: tuple[Rate, ...]
    stacked: Rate | None
    """One rate whose coefficients are arrays, where all have one form."""
    s_per_mb: Array
    last: list[Any]
    """The quotas asked for last, as the very array, and what was found: a prediction asks many times for the same."""
    fixed: dict[float, Array]
    """Seconds at every measured quota, of sizes that do not depend on a configuration: a model, a lease."""
    laid: dict[float | bytes | None, Array]
    """At the quotas asked for last: seconds of one size, or of a row of sizes, and of one MB of many objects."""

    def place(self, nodes: Array, memory: Array) -> tuple[Any, Any]:
        """The node below each quota, and how far it is from there to the one above."""
        known = self.last
        if not known or known[0] is not memory:
            self.laid.clear()
            self.last[:] = known = [memory, *_node(nodes, memory), None, None]
        return known[1], known[2]

    def around(self, nodes: Array, memory: Array) -> tuple[Array, Rate, Rate]:
        """How far from the node below to the one above, and the rates at both."""
        i, weight = self.place(nodes, memory)
        known = self.last
        if known[3] is None:
            known[3:] = self.at(i), self.at(i + 1)
        return weight, known[3], known[4]

    def of_one(self, nodes: Array, size: float, memory: Array) -> Array:
        """Seconds of one size at many quotas."""
        i, weight = self.place(nodes, memory)
        found = self.laid.get(size)
        if found is not None:
            return found
        each = self.fixed.get(size)
        if each is None:
            if len(self.fixed) >= KEPT:
                self.fixed.clear()
            each = self.fixed[size] = self.everywhere(np.asarray(size))
        low = each.take(i)
        return self._keep(size, np.asarray(low + weight * (each.take(i + 1) - low)))

    def of_mb(self, nodes: Array, memory: Array) -> Array:
        """Seconds per MB of many objects."""
        self.place(nodes, memory)
        found = self.laid.get(None)
        return self._keep(None, np.asarray(np.interp(memory, nodes, self.s_per_mb))) if found is None else found

    def _keep(self, key: float | bytes | None, found: Array) -> Array:
        if len(self.laid) >= KEPT:
            self.laid.clear()
        found.flags.writeable = False
        self.laid[key] = found
        return found

    def of_row(self, nodes: Array, size: Array, memory: Array) -> Array:
        """Seconds of a row of sizes at a column of quotas."""
        i, weight = self.place(nodes, memory)
        key = size.tobytes()
        found = self.laid.get(key)
        if found is not None:
            return found
        each, rows = self.everywhere(size[0]), i[:, 0]
        found = (each[1:] - each[:-1]).take(rows, axis=0)
        found *= weight
        found += each.take(rows, axis=0)
        return self._keep(key, found)

    def at(self, node: Any) -> Rate:
        """The rate at some nodes: coefficients of the shape of `node`."""
        if self.stacked is None:
            return self.rates[int(node)] if np.ndim(node) == 0 else _Mixed(self.rates, node)  # type: ignore[return-value]
        form = type(self.stacked)
        return form(**{f.name: getattr(self.stacked, f.name)[node] for f in dataclasses.fields(form)})

    def everywhere(self, size: Array) -> Array:
        """Seconds of every size at every node, nodes first."""
        if self.stacked is None:
            return np.stack([rate.seconds(size) for rate in self.rates])
        form, ones = type(self.stacked), (1,) * size.ndim
        column = {f.name: getattr(self.stacked, f.name).reshape(-1, *ones) for f in dataclasses.fields(form)}
        return form(**column).seconds(size)


@dataclass(frozen=True, slots=True)
class _Mixed:
    """Rates of different forms, one chosen per element."""

    rates: tuple[Rate, ...]
    node: Array

    def seconds(self, size: Array) -> Array:
        at = np.stack(
            [np.broadcast_to(r.seconds(size), np.broadcast_shapes(size.shape, self.node.shape)) for r in self.rates]
        )
        return np.asarray(np.take_along_axis(at, np.broadcast_to(self.node, at.shape[1:])[None], axis=0)[0])


KEPT = 16
"""Sizes, or rows of sizes, of which seconds are kept."""
_KNOWN: dict[int, tuple[tuple[Transfer, ...], dict[str, tuple[Array, _Curves]]]] = {}
"""By the identity of a profile's transfers, which are immutable: stacking them costs more than evaluating them."""


def _curves(transfer: tuple[Transfer, ...]) -> dict[str, tuple[Array, _Curves]]:
    """Measured quotas and stacked rates, by direction."""
    known = _KNOWN.get(id(transfer))
    if known is not None and known[0] is transfer:
        return known[1]
    found = {}
    nodes = np.array([t.memory_mb for t in transfer])
    for direction in ("up", "down"):
        rates: tuple[Rate, ...] = tuple(getattr(t, direction) for t in transfer)
        forms = {type(r) for r in rates}
        stacked = None
        if len(forms) == 1:
            (form,) = forms
            stacked = form(**{f.name: np.array([getattr(r, f.name) for r in rates]) for f in dataclasses.fields(form)})  # type: ignore[arg-type]
        found[direction] = nodes, _Curves(rates, stacked, np.array([1 / r.bandwidth_mb_s for r in rates]), [], {}, {})
    if len(_KNOWN) > 256:
        _KNOWN.clear()
    _KNOWN[id(transfer)] = transfer, found
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model on one dataset."""

    name: str = "workload"
    model_mb: float
    """S_m: MB of the exchanged vector."""
    a: float
    """Seconds·MB per sample: seconds of an iteration are a·(B+b)/(M+m), FasDL equation 3-12."""
    b: float
    m: float
    memory_slope_mb: float
    """k of equation 4-1, MB per sample of a batch."""
    memory_base_mb: float
    """c of equation 4-1."""
    dataset_mb: float
    samples: int
    """D."""
    test_samples: int = 0
    """Evaluated after every epoch, all functions sharing; a forward pass costs a third of a step."""
    state_mb: float = 0.0
    """MB of a checkpoint (parameters, buffers, optimiser); 0: as `model_mb`."""
    vcpus: float = 0.0
    """Share of the CPU above which more brings nothing (one thread per function: 1); 0: no such share."""
    fold_s_per_mb: float = 0.0
    """CPU seconds, on one whole vCPU, to unpack one MB and add it up, or to pack it."""
    apply_s: float = 0.0
    """CPU seconds, on one whole vCPU, of the optimiser's step."""
    step_s: float = 0.0
    """Seconds of an iteration that neither batch nor memory explains, at whatever quota."""
    lockstep_cpu_s: float = 0.0
    """Seconds, on one whole vCPU, by which an iteration of functions in lockstep takes longer than its parts: steps
    scatter and all wait for the slowest, polls are late, and bookkeeping takes CPU time of the share."""
    first_cpu_s: float = 0.0
    """CPU seconds, on one whole vCPU, once in a function's life: building the model, first allocations."""

    def compute_s(self, batch: Array | float, memory_mb: Array | float) -> Array:
        """FasDL, equation 3-12."""
        share = np.asarray(memory_mb) + self.m
        return np.where(share > 0, self.a * (np.asarray(batch) + self.b) / np.maximum(share, 1e-9), np.inf)

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
class PlatformProfile:
    """Functions and one kind of channel between them."""

    name: str
    memory_min_mb: int = 128
    memory_max_mb: int = 10240
    memory_step_mb: int = 128
    lifetime_s: float = 900.0
    cold_start_s: float = 1.5
    warm_start_s: float = 0.05
    start_each_s: float = 0.0
    """Seconds of one machine's time per cold start, for functions that start together on it; 0: they do not share one."""
    price_gb_s: float
    price_invocation: float
    price_put: float = 0.0
    price_get: float = 0.0
    """Per read; a poll costs one, found or not."""
    price_list: float = 0.0
    price_delete: float = 0.0
    price_mb: float = 0.0
    """Per MB moved, for caches that bill by volume."""
    price_gb_hour: float = 0.0
    """Per GB kept in the channel for an hour, for caches that bill by it."""
    least_kept_gb: float = 0.0
    """GB that are billed at least."""
    price_server_hour: float = 0.0
    poll_s: float = 0.0
    """Seconds of one request that finds nothing; 0: the store waits by itself, and is not polled."""
    polls_per_get: float = 0.12
    """Requests that find nothing, per read, where stores have to be polled."""
    channel: str = "objects"
    """`objects`, `cache` or `server`."""
    concurrency: int = 1000
    """Functions that may run at once."""
    burst: int = 0
    """Functions that may start at once, and as many more every `burst_s`, refilled evenly; 0: no such limit."""
    burst_s: float = 0.0
    mb_per_vcpu: float = 1769.0
    total_memory_mb: float = 0.0
    """Sum of all functions' quotas up to which each gets its CPU share (one machine has only so many cores); 0: any."""
    parallel: int = 64
    """Requests that one function can keep under way; the collectives may keep fewer."""
    server_mb_s: float = 0.0
    """MB/s in each direction of a parameter server's link, which all functions share; 0: no limit of its own."""
    transfer: tuple[Transfer, ...]
    measured_mb: float = 0.0
    """Largest object whose transfer was measured; 0: not known, the rates are taken to hold at any size."""
    error_up: float = 0.0
    """Mean relative error of uploads that were kept out of the fit; 0: not known. `error_down` is that of downloads."""
    error_down: float = 0.0
    source: str = ""
    as_of: str = ""
    """ISO date of the prices."""
    notes: tuple[str, ...] = ()

    def start_s(self, workers: Array | float) -> Array:
        """Seconds from the launch until the last of so many functions begins: cold start, and its turn in the burst."""
        w = np.asarray(workers, dtype=float)
        start = np.maximum(self.cold_start_s, w * self.start_each_s)
        return np.asarray(start + np.maximum(w - self.burst, 0.0) * self.burst_s / self.burst if self.burst else start)

    def quotas(self, step_mb: int | None = None) -> Array:
        """All memory quotas, ascending."""
        step = step_mb or self.memory_step_mb
        first = -(-self.memory_min_mb // step) * step
        return np.unique(np.append(np.arange(first, self.memory_max_mb + 1, step), self.memory_max_mb))

    def seconds(self, direction: Literal["up", "down"], size_mb: Array | float, memory_mb: Array | float) -> Array:
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

    def _measured(self, direction: Literal["up", "down"], size: Array, memory: Array) -> Array:
        nodes, rates = _curves(self.transfer)[direction]
        if size.ndim == 0 and len(nodes) > 1:
            return rates.of_one(nodes, float(size), memory)
        shape = size.shape if size.shape == memory.shape else np.broadcast_shapes(size.shape, memory.shape)
        if len(nodes) == 1:
            return np.broadcast_to(rates.at(0).seconds(size), shape)
        if size.ndim == 2 and memory.ndim == 2 and size.shape[0] == memory.shape[1] == 1 and len(memory) > 1:
            return rates.of_row(nodes, size, memory)
        if memory.size == 1 or math.prod(shape) <= 2 * size.size * len(nodes):
            weight, below, above = rates.around(nodes, memory)
            low, high = below.seconds(size), above.seconds(size)
        else:  # few sizes at many quotas: every size once at every node
            i, weight = _node(nodes, memory)
            each = rates.everywhere(size)
            place = np.ogrid[tuple(slice(n) for n in size.shape)] if size.ndim else ()
            low, high = each[(i, *place)], each[(i + 1, *place)]
        found = np.asarray(low + weight * (high - low))
        return found if found.shape == shape else np.broadcast_to(found, shape)

    def seconds_per_mb(self, direction: Literal["up", "down"], memory_mb: Array | float) -> Array:
        """Of many objects at once: the link's own limit."""
        nodes, rates = _curves(self.transfer)[direction]
        memory = np.asarray(memory_mb, dtype=float)
        return rates.of_mb(nodes, memory) if len(nodes) > 1 else np.full(memory.shape, rates.s_per_mb[0])


def _node(nodes: Array, memory_mb: Any) -> tuple[Any, Any]:
    """Between which two measured quotas, and how far from the first to the second."""
    m = np.minimum(np.maximum(memory_mb, nodes[0]), nodes[-1])
    i = nodes[1:-1].searchsorted(m, side="right")
    return i, (m - nodes[i]) / (nodes[i + 1] - nodes[i])


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a plan starts from."""

    workload: Workload
    platform: PlatformProfile
    fit: dict[str, Any] = field(default_factory=dict)
    """How it was measured: probes, confidence intervals, errors on probes kept out. Free form, for people."""

    def to_json(self) -> str:
        """`profile.json`."""
        w = dataclasses.asdict(self.workload)
        p = dataclasses.asdict(self.platform)
        p["memory_mb"] = {k: p.pop(f"memory_{k}_mb") for k in ("min", "max", "step")}
        out: dict[str, Any] = {"workload": w, "platform": p}
        if self.fit:
            out["fit"] = self.fit
        return json.dumps(out, indent=2, default=list) + "\n"

    def save(self, path: Path) -> None:
        path.write_text(self.to_json())


def load_profile(path: str | Path) -> Profile:
    """Reads `profile.json`.

    Raises:
        JobError: absent, not JSON, or a value is missing or makes no sense; named.
    """
    try:
        raw = json.loads(Path(path).read_text())
    except OSError as e:
        raise JobError(f"profile {path} cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise JobError(f"profile {path} is not JSON: {e}") from None
    return parse_profile(raw, where=str(path))


def parse_profile(raw: Any, *, where: str = "profile") -> Profile:
    """A profile from parsed JSON.

    Raises:
        JobError: names the value, the place and what would be right.
    """
    top = _table(raw, where)
    _known(top, {"workload", "platform", "fit"}, where)
    fit = top.get("fit") or {}
    return Profile(
        workload=parse_workload(top.get("workload"), where=f"{where}: workload"),
        platform=parse_platform(top.get("platform"), where=f"{where}: platform"),
        fit=dict(_table(fit, f"{where}: fit")),
    )


OPTIONAL_WORKLOAD = (
    "test_samples", "state_mb", "vcpus", "fold_s_per_mb", "apply_s", "step_s", "lockstep_cpu_s", "first_cpu_s",
)  # fmt: skip


def parse_workload(raw: Any, *, where: str) -> Workload:
    """The `workload` table."""
    table = _table(raw, where)
    _known(table, {f.name for f in dataclasses.fields(Workload)}, where)
    required = ("model_mb", "a", "b", "m", "memory_slope_mb", "memory_base_mb", "dataset_mb", "samples")
    values: dict[str, Any] = {k: _number(table, k, where) for k in required}
    for k in OPTIONAL_WORKLOAD:
        if k in table:
            values[k] = _number(table, k, where)
    for k in ("model_mb", "a", "samples"):
        _must(values[k] > 0, f"{where}.{k} = {values[k]:g} should be above 0")
    for k in values.keys() - {"m", "b"}:
        _must(values[k] >= 0, f"{where}.{k} = {values[k]:g} should not be negative")
    _must(values["b"] >= 0, f"{where}.b = {values['b']:g} would make small batches nearly free: should not be negative")
    for k in ("samples", "test_samples"):
        _must(float(values.get(k, 0)).is_integer(), f"{where}.{k} = {values.get(k)} should be a whole number")
        values[k] = int(values.get(k, 0))
    return Workload(name=str(table.get("name", "workload")), **values)


def parse_platform(raw: Any, *, where: str) -> PlatformProfile:
    """The `platform` table."""
    table = dict(_table(raw, where))
    memory = _table(table.pop("memory_mb", None), f"{where}.memory_mb")
    _known(memory, {"min", "max", "step"}, f"{where}.memory_mb")
    sizes = {k: int(_number(memory, k, f"{where}.memory_mb")) for k in ("min", "max", "step")}
    _must(
        0 < sizes["min"] <= sizes["max"] and sizes["step"] > 0,
        f"{where}.memory_mb = {sizes} should be 0 < min ≤ max and step > 0",
    )
    text: dict[str, Any] = {k: str(table.pop(k)) for k in ("name", "channel", "source", "as_of") if k in table}
    _must("name" in text, f"{where}.name is missing")
    _must(
        text.get("channel", "objects") in ("objects", "cache", "server"),
        f"{where}.channel = {text.get('channel')!r} should be objects, cache or server",
    )
    notes = tuple(map(str, table.pop("notes", ())))
    rows = table.pop("transfer", None)
    _must(isinstance(rows, list) and len(rows) > 0, f"{where}.transfer should be a list of at least one measured quota")
    transfer = sorted(
        (_transfer(row, f"{where}.transfer[{i}]") for i, row in enumerate(rows)), key=lambda t: t.memory_mb
    )
    nodes = [t.memory_mb for t in transfer]
    _must(len(set(nodes)) == len(nodes), f"{where}.transfer has two rows of the same memory_mb")
    required = {"lifetime_s", "cold_start_s", "price_gb_s", "price_invocation", "price_put", "price_get", "poll_s"}
    numbers = {
        f.name
        for f in dataclasses.fields(PlatformProfile)
        if not f.name.startswith("memory_")
        and f.name not in ("name", "channel", "source", "as_of", "notes", "transfer")
    }
    _known(table, numbers, where)
    values: dict[str, Any] = {k: _number(table, k, where) for k in sorted(numbers & (required | table.keys()))}
    for k, v in values.items():
        _must(v >= 0, f"{where}.{k} = {v:g} should not be negative")
    for k in ("lifetime_s", "mb_per_vcpu", "parallel", "concurrency"):
        _must(values.get(k, 1) > 0, f"{where}.{k} = {values.get(k)} should be above 0")
    for k in ("parallel", "concurrency", "burst"):
        if k in values:
            values[k] = int(values[k])
    return PlatformProfile(
        **text, **values, notes=notes, transfer=tuple(transfer),
        memory_min_mb=sizes["min"], memory_max_mb=sizes["max"], memory_step_mb=sizes["step"],
    )  # fmt: skip


def _transfer(raw: Any, where: str) -> Transfer:
    table = _table(raw, where)
    _known(table, {"memory_mb", "up", "down"}, where)
    memory = _number(table, "memory_mb", where)
    _must(memory > 0, f"{where}.memory_mb = {memory:g} should be above 0")
    return Transfer(
        memory_mb=memory, up=_rate(table.get("up"), f"{where}.up"), down=_rate(table.get("down"), f"{where}.down")
    )


_FORMS: tuple[type[Rate], ...] = (Saturating, Affine, Power, Knee)
_MAY_BE_ZERO = ("latency_s", "s_per_mb_beyond")


def _rate(raw: Any, where: str) -> Rate:
    table = _table(raw, where)
    for form in _FORMS:
        names = [f.name for f in dataclasses.fields(form)]
        if set(names) == table.keys():
            values = {k: _number(table, k, where) for k in names}
            for k, v in values.items():
                _must(v > 0 or (k in _MAY_BE_ZERO and v == 0), f"{where}.{k} = {v:g} should be above 0")
            return form(**values)
    forms = " or ".join("{" + ", ".join(f.name for f in dataclasses.fields(form)) + "}" for form in _FORMS)
    raise JobError(f"{where} has {{{', '.join(sorted(table))}}}", remedy=f"give {forms}")


def _table(raw: Any, where: str) -> Mapping[str, Any]:
    _must(isinstance(raw, Mapping), f"{where} is missing, or is not a table of names and values")
    return raw  # type: ignore[no-any-return]


def _known(table: Mapping[str, Any], names: Sequence[str] | set[str], where: str) -> None:
    unknown = sorted(table.keys() - set(names))
    _must(not unknown, f"{where} has the unknown key {', '.join(unknown)}; known are {', '.join(sorted(names))}")


def _number(table: Mapping[str, Any], key: str, where: str) -> float:
    _must(key in table, f"{where}.{key} is missing")
    value = table[key]
    _must(
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
        f"{where}.{key} = {value!r} should be a number",
    )
    return float(value)


def _must(holds: bool, text: str) -> None:
    if not holds:
        raise JobError(text)
