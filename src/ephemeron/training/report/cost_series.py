"""Cost and traffic of a run over time.

GB-seconds accrue evenly while an invocation runs, scaled to its bill where there is one; the price of the call
falls due when it is made; requests are known whenever a function reports its counters. A function that was
killed does not report its last requests: those after its last report are missing from the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ephemeron.events import Ended, Event, Progress, StoreRequests, Suspended, Traffic, Woken
from ephemeron.prices import Prices
from ephemeron.training.report.invocations import InvocationRow, owner
from ephemeron.training.report.metrics import DRAWN_POINTS, Points

Floats = npt.NDArray[np.floating[Any]]

_COUNTERS = tuple(f.name for f in dataclasses.fields(Traffic))


class CostRates(Protocol):
    """Rates of the platform and the channel."""

    @property
    def gb_second_usd(self) -> float: ...
    @property
    def invocation_usd(self) -> float: ...
    @property
    def put_usd(self) -> float: ...
    @property
    def get_usd(self) -> float: ...
    @property
    def delete_usd(self) -> float: ...
    @property
    def list_usd(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Cumulative series, all at the same `times`, and their ends."""

    times: tuple[float, ...] = ()
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """compute_usd, requests_usd, calls_usd, total_usd and the counters of `Traffic`."""
    compute_usd: float = 0.0
    requests_usd: float = 0.0
    direct_usd: float = 0.0
    """Price of bytes over direct links."""
    calls_usd: float = 0.0
    """Price of the invocations themselves."""
    burst_vcpu_s: float = 0.0
    burst_usd: float = 0.0
    """CPU time beyond what comes with the memory, where it is billed."""
    suspended_usd: float = 0.0
    """Memory of suspended functions, where they can be suspended."""
    gb_seconds: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    estimated: bool = False
    """Some invocation has no bill yet, so its share is estimated from its quota."""

    @property
    def total_usd(self) -> float:
        """Without storage, which no event states."""
        return self.compute_usd + self.requests_usd + self.direct_usd + self.calls_usd + self.burst_usd + self.suspended_usd

    def points(self, name: str) -> Points:
        """One series as (seconds, value)."""
        return tuple(zip(self.times, self.series.get(name, ()), strict=True))


def spending(
    rows: Sequence[InvocationRow], told: Iterable[Progress | StoreRequests], prices: CostRates, *, now: float
) -> tuple[Spending, tuple[InvocationRow, ...]]:
    """The spending, and the rows with the traffic that their functions reported."""
    changes, counted = _traffic_changes(rows, told)
    rows = tuple(dataclasses.replace(r, traffic=counted.get((r.rank, r.attempt, r.invocation), r.traffic)) for r in rows)
    times = _times(rows, changes, now)
    series: dict[str, Floats] = {name: _step_series(changes, name, times) for name in _COUNTERS}
    series["requests_usd"] = np.zeros(len(times), dtype=np.float64)
    for name, price in _request_prices(prices).items():
        series["requests_usd"] = series["requests_usd"] + series[name] * price
    series["compute_usd"] = _compute(rows, times) * prices.gb_second_usd
    called = np.sort(np.array([r.invoked for r in rows], dtype=float))
    series["calls_usd"] = np.searchsorted(called, times, side="right") * prices.invocation_usd
    series["total_usd"] = series["compute_usd"] + series["requests_usd"] + series["calls_usd"]
    traffic = sum((t for t in counted.values()), Traffic())
    return Spending(
        times=tuple(times.tolist()),
        series={name: tuple(values.tolist()) for name, values in series.items()},
        compute_usd=sum(r.gb_seconds for r in rows) * prices.gb_second_usd,
        requests_usd=requests_usd(traffic, prices),
        calls_usd=len(rows) * prices.invocation_usd,
        gb_seconds=sum(r.gb_seconds for r in rows),
        traffic=traffic,
        estimated=any(not r.ended for r in rows),
    ), rows


def with_further(spent: Spending, events: Iterable[Event], prices: CostRates) -> Spending:
    """The spending with what has no series: bytes over direct links, bursts and suspensions, which are billed when they are over."""
    if not isinstance(prices, Prices):
        return spent
    burst_vcpu_s = suspended = 0.0
    for event in events:
        if isinstance(event, Ended):
            burst_vcpu_s += event.burst_vcpu_s
        elif isinstance(event, Suspended):
            suspended += prices.suspended_usd(event.gb, 0.0, resumed=False)
        elif isinstance(event, Woken):
            suspended += prices.suspended_usd(event.gb, event.seconds, resumed=True)
            suspended -= prices.suspended_usd(event.gb, 0.0, resumed=False)
    burst_usd = burst_vcpu_s * prices.burst_vcpu_second_usd
    direct_usd = spent.traffic.direct_bytes_sent * prices.direct_byte_usd
    return dataclasses.replace(spent, burst_vcpu_s=burst_vcpu_s, burst_usd=burst_usd, suspended_usd=suspended, direct_usd=direct_usd)


def requests_usd(traffic: Traffic, prices: CostRates) -> float:
    """Price of channel operations. A poll is a read like any other, and costs as much."""
    return float(sum(getattr(traffic, name) * price for name, price in _request_prices(prices).items()))


def _request_prices(prices: CostRates) -> dict[str, float]:
    return {"puts": prices.put_usd, "gets": prices.get_usd, "polls": prices.get_usd, "deletes": prices.delete_usd, "lists": prices.list_usd}


_Key = tuple[int, int, str]
_Changes = list[tuple[float, Traffic]]


def _traffic_changes(rows: Sequence[InvocationRow], told: Iterable[Progress | StoreRequests]) -> tuple[_Changes, dict[_Key, Traffic]]:
    """(time, increment) in the order of time, and where each invocation's counters ended."""
    by_attempt: dict[tuple[int, int], list[InvocationRow]] = {}
    for r in rows:
        by_attempt.setdefault((r.rank, r.attempt), []).append(r)
    readings: list[tuple[float, _Key, Traffic]] = []
    for p in told:
        if isinstance(p, StoreRequests):
            readings.append((p.t, (-1, 0, p.source), p.traffic))
            continue
        row = owner(by_attempt.get((p.rank, p.attempt), ()), p.t)
        readings.append((p.t, (p.rank, p.attempt, row.invocation if row else ""), p.traffic))
    readings += [(r.end, (r.rank, r.attempt, r.invocation), r.traffic) for r in rows if r.ended]
    readings.sort(key=lambda reading: reading[0])
    counted: dict[_Key, Traffic] = {}
    changes: _Changes = []
    for t, key, traffic in readings:
        before = counted.get(key, Traffic())
        counted[key] = _each(max, before, traffic)
        changes.append((t, _each(lambda a, b: b - a, before, counted[key])))
    return changes, counted


def _each(op: Callable[[int, int], int], a: Traffic, b: Traffic) -> Traffic:
    return Traffic(**{name: op(getattr(a, name), getattr(b, name)) for name in _COUNTERS})


def _times(rows: Sequence[InvocationRow], changes: _Changes, now: float) -> Floats:
    """Every moment at which something changes, or an even choice of them when there are too many."""
    moments = {0.0, now, *(t for t, _ in changes)}
    for r in rows:
        moments.update((r.invoked, r.start, r.end))
    times = np.array(sorted(moments), dtype=float)
    if len(times) <= DRAWN_POINTS:
        return times
    return np.asarray(times[np.linspace(0, len(times) - 1, DRAWN_POINTS).round().astype(int)])


def _step_series(changes: _Changes, name: str, times: Floats) -> Floats:
    at = np.array([t for t, _ in changes], dtype=float)
    total = np.concatenate([[0.0], np.cumsum([getattr(c, name) for _, c in changes])])
    return np.asarray(total[np.searchsorted(at, times, side="right")], dtype=np.float64)


def _compute(rows: Sequence[InvocationRow], times: Floats) -> Floats:
    """GB-seconds so far."""
    out = np.zeros(len(times))
    for r in rows:
        if r.end > r.start:
            out += r.gb_seconds * np.clip((times - r.start) / (r.end - r.start), 0.0, 1.0)
        else:
            out += r.gb_seconds * (times >= r.end)
    return out
