"""Searches and equations to compare with; plans rest on none of them.

two_stage   FasDL's two-stage heuristic (algorithms 3.1 and 3.2), and every candidate computed one after the other
published   FasDL's equations 3-1 to 3-29 exactly as published
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from ephemeron.training.planner.model.exchange import ExecutionOptions, Numbers, broadcast
from ephemeron.training.planner.model.prediction import Prediction
from ephemeron.training.planner.model.profile import PlatformProfile, Workload
from ephemeron.training.planner.plan import PlanLimits
from ephemeron.training.planner.search.pareto import Candidate, SearchResult
from ephemeron.training.planner.search.space import Option, Space

DELTAS = (0.6, 0.7, 0.8, 0.9, 1.0)
"""Shrinking factors of algorithm 3.2."""


def brute_force(space: Space, limits: PlanLimits, *, minimise: str = "cost") -> SearchResult:
    """Computes every candidate. Slow; for comparison with `exact`."""
    began = time.perf_counter()
    found = SearchResult("brute-force", optimal=True)
    for o in space.options:
        for w, k, ba, bn in space.candidates(o):
            for m in space.quotas:
                found.evaluated += len(w)
                ms = np.full_like(w, m)
                p = space.predict(o, w, ms, k, ba, bn)
                good = space.fits(o, w, ms, k, ba, bn) & (p.seconds <= limits.seconds) & (p.cost_usd <= limits.usd)
                i = np.flatnonzero(good & np.isfinite(p.seconds))
                if len(i):
                    two = (p.cost_usd, p.seconds) if minimise == "cost" else (p.seconds, p.cost_usd)
                    first = i[np.lexsort((ba[i], k[i], w[i], two[1][i], two[0][i]))[0]]
                    nw, nm, nk, na, nn = (int(x[first]) for x in (w, ms, k, ba, bn))
                    _consider(found, Candidate(o, nw, nm, nk, na, nn, float(p.seconds[first]), float(p.cost_usd[first])), limits, minimise)
    found.seconds = time.perf_counter() - began
    return found


def _consider(found: SearchResult, one: Candidate | None, limits: PlanLimits, minimise: str) -> None:
    if one is None or one.seconds > limits.seconds or one.cost_usd > limits.usd or math.isinf(one.seconds):
        return
    if found.best is None or one.key(minimise) < found.best.key(minimise):
        found.best = one


def evaluate(space: Space, o: Option, w: float, m: float, k: float, b: float, other: float | None = None) -> Candidate | None:
    """One candidate, its B^n by equation 3-22 unless given; None if memory or the global batch forbid it."""
    ws, ms, ks, bs = (np.array([float(x)]) for x in (w, m, k, b))
    bn = space.other_batch(o, ws, ms, ks, bs) if other is None else np.array([float(other)])
    if not space.fits(o, ws, ms, ks, bs, bn)[0]:
        return None
    p = space.predict(o, ws, ms, ks, bs, bn)
    return Candidate(o, int(w), int(m), int(k), int(b), int(bn[0]), float(p.seconds[0]), float(p.cost_usd[0]))


def two_stage(space: Space, limits: PlanLimits, *, minimise: str = "cost") -> SearchResult:
    """FasDL, algorithms 3.1 and 3.2 as published: ScatterReduce first, then K and B^n for its W, M and B^a.

    A heuristic without a proof, which finds nothing where ScatterReduce has no configuration near the limits. Of the
    options it takes K-REDUCE under HAP, or all if there is none.
    """
    began = time.perf_counter()
    found = SearchResult("two-stage")
    hap = [o for o in space.options if o.terms.sync == "hap"]
    for o in hap or space.options:
        for delta in DELTAS:
            stage = _shrunk(space, o, limits, delta, found, minimise)
            if stage is None:
                continue
            w, m, b = stage
            low, high = o.aggregators(w) if o.tied else (1, w)
            for k in range(low, high + 1):
                found.evaluated += 1
                _consider(found, evaluate(space, o, w, m, k, b), limits, minimise)
    found.seconds = time.perf_counter() - began
    return found


def _shrunk(space: Space, o: Option, limits: PlanLimits, delta: float, found: SearchResult, minimise: str) -> tuple[int, int, int] | None:
    """Algorithm 3.1: W, M and B^a of the cheapest ScatterReduce under T_max/δ and B^g_max·δ.

    Its lines 15 to 17 leave the loop over batches at the first one that is too slow, which is the smallest, although
    larger ones are faster; its text gives up a quota only if no batch is fast enough. The text is followed.
    """
    best: tuple[float, int, int, int] | None = None
    quotas = space.quotas[::-1]
    for w in range(*_inclusive(o.workers(space.most_workers))):
        m, b = (x.ravel() for x in np.meshgrid(quotas, space.batches, indexing="ij"))
        ws = np.full_like(m, w)
        p = space.predict(o, ws, m, ws, b, b)
        found.evaluated += len(m)
        grid = (len(quotas), len(space.batches))
        seconds, usd = p.seconds.reshape(grid), p.cost_usd.reshape(grid)
        upper = space.largest_batch(o, quotas)
        for i in range(len(quotas)):
            stop = True
            for j, batch in enumerate(space.batches):
                if batch > upper[i] or batch * w > space.largest_global_batch * delta:
                    break
                if seconds[i, j] > limits.seconds / delta:
                    continue
                stop = False
                value = usd[i, j] if minimise == "cost" else seconds[i, j]
                if best is None or value < best[0]:
                    best = (float(value), w, int(quotas[i]), int(batch))
            if stop:
                break
    return None if best is None else best[1:]


def _inclusive(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0], bounds[1] + 1


# -- time and cost by the equations of the FasDL thesis -----------------------------------------------------------


def published(
    workload: Workload,
    platform: PlatformProfile,
    terms: ExecutionOptions,
    *,
    workers: Numbers,
    memory_mb: Numbers,
    aggregators: Numbers,
    batch: Numbers,
    other_batch: Numbers,
) -> Prediction:
    """Time and cost of whole runs, as `prediction.predict`.

    One request after another, no latency beyond what 3-5 and 3-6 hold, no starts, hand-offs, polls or checkpoints, iterations that
    need not be whole, a model and its data loaded once per epoch (3-16), and the aggregators' path taken for every rank's (3-20,
    under the condition 3-22).
    """
    w, m, k, ba, bn = broadcast(workers, memory_mb, aggregators, batch, other_batch)
    shard = workload.model_mb / k  # 3-1
    up, down = platform.seconds("up", shard, m), platform.seconds("down", shard, m)
    distributed = w > 1
    t_up = np.where(distributed, k * up, 0.0)  # 3-2
    t_agg = np.where(distributed, (w - 1) * down + up, 0.0)  # 3-3
    t_down = np.where(distributed, k * down, 0.0)  # 3-4
    train = workload.compute_s(ba, m)  # 3-12
    global_batch = ba * k + bn * (w - k)  # 3-14
    load = platform.seconds("down", workload.model_mb + workload.dataset_mb * bn / global_batch, m)  # 3-13, 3-15
    per_epoch = workload.samples / global_batch  # 3-17
    iterations = terms.epochs * per_epoch
    each = train + t_up + t_agg + t_down  # 3-20
    seconds = terms.epochs * load + iterations * each  # 3-18
    puts, gets = (np.where(distributed, iterations * k * w, 0.0), np.where(distributed, iterations * 2 * k * (w - 1), 0.0))
    functions = platform.price_gb_s * seconds * m / 1024 * w  # 3-23
    requests = puts * platform.price_put + gets * platform.price_get  # 3-24 to 3-26
    moved = terms.epochs * 2 * workload.dataset_mb + np.where(distributed, iterations * workload.model_mb * (3 * w - 2), 0.0)
    storage = moved * platform.price_mb  # 3-27, 3-28
    zero = np.zeros_like(w)
    return Prediction(
        seconds=seconds,
        cost_usd=functions + requests + storage,
        iteration_s=each,
        iterations=iterations,
        start_s=zero,
        load_s=terms.epochs * load,
        compute_s=iterations * train,
        upload_s=iterations * t_up,
        aggregate_s=iterations * t_agg,
        download_s=iterations * t_down,
        relay_s=zero,
        invocations=terms.epochs * w,
        puts=puts,
        gets=gets,
        polls=zero,
        functions_usd=functions,
        storage_usd=np.broadcast_to(storage, w.shape),
        requests_usd=requests,
        memory_needed_mb=np.broadcast_to(workload.memory_needed_mb(np.maximum(ba, bn)), w.shape),
    )


METHODS: dict[str, Callable[..., SearchResult]] = {"two-stage": two_stage, "brute-force": brute_force}
"""Searches by the names of `ephemeron plan --search`."""

__all__ = ["METHODS", "brute_force", "published", "two_stage"]
