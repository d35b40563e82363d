"""Predicted time and cost of a run: FasDL section 3.3, and the effects that its equations leave out.

Pure and vectorised: a configuration is a set of arrays that broadcast against each other, so that one call prices a
million of them. Plans rest on `predict`; `baselines.published` has the thesis's own equations, for comparison. Where and why
they differ is written down in docs/decisions/0007. In short, `predict` counts

- objects under way together: n of them take one object's time and n − 1 times the larger of what the link needs for
  one and what a window of `parallel` requests leaves for one (3-2 to 3-4 take the sum of n objects alone, which is the
  same for a window of one);
- which rank waits for which (a contribution is read after it was written; under BSP the slowest worker counts);
- whole iterations, the last one of an epoch partial (3-17 divides);
- that functions in lockstep wait for the slowest;
- cold starts, loading, evaluation, hand-offs before the timeout and their checkpoints, the end of the run;
- every request that is billed: puts, reads, polls that find nothing, invocations; and what the CPU does to bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np

from ephemeron.errors import JobError
from ephemeron.training.planner.model.lives import Handing, dies_too_early, lives_of
from ephemeron.training.planner.model.profile import PlatformProfile, Workload
from ephemeron.training.planner.model.rates import Array

Numbers: TypeAlias = Array | float | int

PREDICTED = ("bsp", "hap")
"""Protocols under which every iteration waits for a set of contributions that is known beforehand."""
UP = {"none": 1.0, "bf16": 0.5, "int8": 0.2549}
"""Share of the bytes that a contribution keeps; int8 carries one float32 scale per 1,024 elements."""
DOWN = {"none": 1.0, "bf16": 0.5, "int8": 0.5}
"""Share of the bytes that a merged shard keeps: bf16 under int8."""
TINY_MB = 0.001
"""Leases, positions, specifications."""
START_READS, START_PUTS = 5, 1
"""Specification, code, training and test data, initial weights; the lease."""
RELAY_PUTS, RELAY_READS = 4, 6
"""Claim, lease, checkpoint, position; specification, code, training and test data, position, checkpoint."""
GATHERED, UNDER_WAY_MB = 4, 3.0
"""Contributions that an aggregator fetches ahead, or as many as these MB are."""
CONTROL_EVERY_S = 2.0
"""Seconds between two checks of rank 0 for a stop request."""
CLOSE = 0.01
"""Relative difference of two times below which the less favourable order of the two events is assumed."""
CHUNK_MB = 1.0
"""Chunk of the pipelined form, or half a shard if that is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """Options of a run that are fixed while workers, memory and batches vary."""

    pattern: str = "k-reduce"
    """`k-reduce`, `all-reduce`, `scatter-reduce`, `pipelined`, `parameter-server` or `standalone`."""
    sync: str = "bsp"
    """`bsp` or `hap`."""
    compression: str = "none"
    epochs: int = 1
    lifetime_s: float | None = None
    """Function timeout; None: the platform's limit."""
    checkpoint_every: int = 25

    def __post_init__(self) -> None:
        if self.sync not in PREDICTED:
            raise JobError(
                f"sync {self.sync!r} cannot be predicted: how long its iterations take depends on which contributions "
                "happen to arrive in time, and taking them for those of bsp errs",
                remedy="plan with sync bsp or hap, or train with a configuration given by hand",
            )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Arrays of the broadcast shape of the configurations; seconds and US dollars."""

    seconds: Array
    cost_usd: Array
    iteration_s: Array
    iterations: Array
    start_s: Array
    load_s: Array
    compute_s: Array
    """On the critical path, as are the next three."""
    upload_s: Array
    aggregate_s: Array
    download_s: Array
    relay_s: Array
    invocations: Array
    puts: Array
    gets: Array
    polls: Array
    functions_usd: Array
    storage_usd: Array
    requests_usd: Array
    memory_needed_mb: Array

    def each(self) -> list[Prediction]:
        """Every configuration of many, as plain numbers."""
        columns = (np.broadcast_to(getattr(self, f.name), self.seconds.shape).ravel().tolist() for f in fields(self))
        return [Prediction(*row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of one exchange on the critical path, by phase, and its requests."""

    upload_s: Array
    aggregate_s: Array
    download_s: Array
    other_s: Array
    """A non-aggregator's own: equation 3-11 under HAP; else until it has what its contribution went into. 0: none."""
    puts: Array
    gets: Array
    moved_mb: Array

    @property
    def seconds(self) -> Array:
        """Equation 3-7."""
        return self.upload_s + self.aggregate_s + self.download_s


def broadcast(*numbers: Numbers) -> tuple[Array, ...]:
    """Views of one shape."""
    found = _arrays(*numbers)
    return found if len({x.shape for x in found}) == 1 else np.broadcast_arrays(*found)


def _arrays(*numbers: Numbers) -> tuple[Array, ...]:
    """Arrays of their own shapes: what depends on shards alone, or on quotas alone, is computed once for each."""
    return tuple(np.asarray(x, dtype=float) for x in numbers)


def span_s(
    platform: PlatformProfile, direction: Any, objects: Numbers, size_mb: Numbers, memory_mb: Numbers,
    parallel: Numbers = math.inf, alone: Array | None = None,
) -> Array:  # fmt: skip
    """Seconds for some objects of one size over one function's link, `parallel` of them under way at a time.

    Args:
        alone: seconds of one of them, where that is known.

    Returns:
        0 where there are none; one object's time for one.
    """
    n, size, memory = _arrays(objects, size_mb, memory_mb)
    if alone is None:
        alone = platform.seconds(direction, size, memory)
    window = np.minimum(platform.parallel, parallel)
    each = np.maximum(size * platform.seconds_per_mb(direction, memory), alone / window)
    return np.where(n > 0, alone + (n - 1) * np.minimum(each, alone), 0.0)


def exchange(
    workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, *, workers: Numbers, aggregators: Numbers,
    memory_mb: Numbers,
) -> Exchange:  # fmt: skip
    """One exchange of the whole vector: equations 3-1 to 3-7, 3-11, 3-24 and 3-25.

    Args:
        workload, platform, terms: what, where and how.
        workers, aggregators, memory_mb: W, K and M. Shapes that only broadcast, (K, 1) against (1, M), are far cheaper
            than the same numbers laid out.

    Returns:
        Arrays of the broadcast shape.
    """
    w, k, m = _arrays(workers, aggregators, memory_mb)
    shape = np.broadcast_shapes(w.shape, k.shape, m.shape)
    s_up = workload.model_mb * UP[terms.compression] / k
    s_down = workload.model_mb * DOWN[terms.compression] / k
    cpu = workload.fold_s_per_mb / np.minimum(m / platform.mb_per_vcpu, workload.vcpus or np.inf)
    wait = np.where(w > 1, platform.poll_s * platform.polls_per_get, 0.0)
    alone = w == 1
    if terms.pattern == "standalone":
        return _shaped(shape, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    if terms.pattern == "parameter-server":
        return _shaped(shape, *_through_server(workload, platform, w, m))
    if terms.pattern == "pipelined":
        return _shaped(shape, *_pipelined(workload, platform, terms, w, k, m, cpu))
    plain = w > k  # some rank aggregates nothing
    one_up, one_down = platform.seconds("up", s_up, m), platform.seconds("down", s_up, m)
    per_mb = platform.seconds_per_mb("down", m)
    same = UP[terms.compression] == DOWN[terms.compression]
    publish = one_up if same else platform.seconds("up", s_down, m)
    one_read = one_down if same else platform.seconds("down", s_down, m)
    # If the store waits, a request made before the object exists has no latency left after it.
    asked = 0.0 if platform.poll_s else np.minimum(platform.seconds("down", TINY_MB, m), one_down)
    sent = span_s(platform, "up", k - 1, s_up, m, alone=one_up)
    folding = cpu * ((w - 1) * s_up + s_down)
    window = np.maximum(GATHERED, np.floor(UNDER_WAY_MB / s_up))
    aggregate = span_s(platform, "down", w - 1, s_up, m, window, one_down) + folding + publish + wait
    read = span_s(platform, "down", k - 1, s_down, m, alone=one_read)
    download = np.maximum(read - asked, 0.0) + cpu * s_down * k + wait
    sent_n = span_s(platform, "up", k, s_up, m, alone=one_up)
    read_n = span_s(platform, "down", k, s_down, m, alone=one_read)
    if terms.sync == "hap":
        other = sent_n + read_n + cpu * (s_up + s_down) * k + wait  # 3-11
    else:
        # Aggregators have read each other's by then: the others' first shards find the link idle, and their last.
        folded = np.maximum(one_up + (w - k) * s_up * per_mb, sent_n + one_down - asked)
        other = folded + cpu * (s_up + s_down) + publish + read_n - asked + cpu * s_down * k + 2 * wait
    puts, gets = k * w, 2 * k * (w - 1)
    moved = _moved_mb(workload, terms, w)
    phases = (sent, aggregate, download, np.where(plain, other, 0.0), puts, gets, moved)
    return _shaped(shape, *(np.where(alone, 0.0, x) for x in phases))


def _shaped(shape: tuple[int, ...], *values: Numbers) -> Exchange:
    return Exchange(*(x if np.shape(x) == shape else np.broadcast_to(x, shape) for x in values))  # type: ignore[arg-type]


def _moved_mb(workload: Workload, terms: ExecutionOptions, w: Array) -> Array:
    """Both ways: every contribution but an aggregator's own shard, and every merged shard once up and W − 1 times down."""
    return workload.model_mb * (2 * (w - 1) * UP[terms.compression] + w * DOWN[terms.compression])


def _pipelined(
    workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, w: Array, k: Array, m: Array, cpu: Array
) -> tuple[Numbers, ...]:
    """Everything at once: the longest of the chains that `round_bound_s` derives."""
    size = workload.model_mb
    up, down = UP[terms.compression], DOWN[terms.compression]
    sent = np.where(w > k, k, k - 1)
    latency_up, latency_down = platform.seconds("up", TINY_MB, m), platform.seconds("down", TINY_MB, m)
    per_up, per_down = platform.seconds_per_mb("up", m), platform.seconds_per_mb("down", m)
    shard = size / k
    chunk = np.minimum(CHUNK_MB, shard / 2)
    downlink = latency_down + ((w - 1) * up + (k - 1) * down) * shard * per_down
    uplink = (sent * up + down) * shard * per_up
    chains = np.maximum(downlink, latency_up + latency_down + np.maximum(uplink, (w - 1) * up * shard * per_down))
    tail = np.minimum(w - 1, 3) * chunk * up * per_up  # as long as it takes until every link is busy
    wait = platform.poll_s * platform.polls_per_get
    total = np.where(w > 1, chains + tail + cpu * (w - 1 + k) * shard + 2 * wait, 0.0)
    chunks = np.where(w > 1, np.ceil(shard / chunk - 1e-9), 0.0)
    moved = np.where(w > 1, _moved_mb(workload, terms, w), 0.0)
    return 0.0, total, 0.0, 0.0, k * w * chunks, 2 * k * (w - 1) * chunks, moved


def _through_server(workload: Workload, platform: PlatformProfile, w: Array, m: Array) -> tuple[Numbers, ...]:
    """λDNN: push to and pull from one server, whose link carries every worker's bytes."""
    s = workload.model_mb
    shared = w * s / platform.server_mb_s if platform.server_mb_s else np.zeros_like(w)
    up = np.maximum(platform.seconds("up", s, m), shared)
    down = np.maximum(platform.seconds("down", s, m), shared)
    alone = w == 1
    up, down, each = (np.where(alone, 0.0, x) for x in (up, down, w))
    return up, 0.0, down, 0.0, each, each, 2 * s * each


def largest_nonaggregator_batch(
    workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, *, workers: Numbers, aggregators: Numbers,
    memory_mb: Numbers, batch: Numbers,
) -> Array:  # fmt: skip
    """B^n of equation 3-22: the most samples that a non-aggregator computes while an aggregator aggregates.

    Under BSP, or where every rank aggregates, the aggregators' own batch.
    """
    w, k, m, b = broadcast(workers, aggregators, memory_mb, batch)
    if terms.sync != "hap" or terms.pattern not in ("k-reduce", "all-reduce", "scatter-reduce"):
        return b.copy()
    e = exchange(workload, platform, terms, workers=w, aggregators=k, memory_mb=m)
    return np.where(w > k, samples_in(workload, platform, b, np.maximum(e.seconds - e.other_s, 0.0), m), b)


def samples_in(workload: Workload, platform: PlatformProfile, batch: Array, spare_s: Array, memory_mb: Array) -> Array:
    """A batch, and the whole samples that fit into some spare seconds besides (equation 3-22 solved for B^n)."""
    return np.floor(batch + spare_s * (usable_mb(workload, platform, memory_mb) + workload.m) / workload.a + 1e-9)


def usable_mb(workload: Workload, platform: PlatformProfile, memory_mb: Array) -> Array:
    """The quota that computing can make use of: more CPUs than threads bring nothing."""
    return np.minimum(memory_mb, workload.vcpus * platform.mb_per_vcpu) if workload.vcpus else memory_mb


def predict(
    workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, *, workers: Numbers, memory_mb: Numbers,
    aggregators: Numbers, batch: Numbers, other_batch: Numbers,
) -> Prediction:  # fmt: skip
    """Time and cost of whole runs.

    Args:
        workload, platform, terms: what, where and how.
        workers, memory_mb, aggregators: W, M (MiB) and K.
        batch, other_batch: B^a and B^n.

    Returns:
        Arrays of the broadcast shape.
    """
    w, m, k, ba, bn = broadcast(workers, memory_mb, aggregators, batch, other_batch)
    quota = usable_mb(workload, platform, m)
    share = quota / platform.mb_per_vcpu
    global_batch = ba * k + bn * (w - k)  # 3-14
    per_epoch = np.ceil(workload.samples / global_batch)
    iterations = terms.epochs * per_epoch
    rest = workload.samples / global_batch - (per_epoch - 1)  # of the last iteration
    larger = np.where(w > k, np.maximum(ba, bn), ba)

    def compute(part: Numbers) -> tuple[Array, Array]:
        return (workload.compute_s(ba * part, quota), np.where(w > k, workload.compute_s(bn * part, quota), 0.0))

    ca, cn = compute(1.0)
    e = exchange(workload, platform, terms, workers=w, aggregators=k, memory_mb=m)
    own = workload.step_s + workload.apply_s / share
    # Two chains run side by side, through the aggregators and through the others; the slower one sets the pace.
    each = np.maximum(ca + e.seconds, cn + e.other_s)
    last_a, last_n = compute(rest)
    last = np.maximum(last_a + e.seconds, last_n + e.other_s)
    if workload.lockstep_cpu_s:
        together = np.minimum(k, w) if terms.sync == "hap" else w  # under HAP aggregators wait for each other only
        late = np.where(together > 1, workload.lockstep_cpu_s / share, 0.0)
        each, last = each + late, last + late
    loop_s = terms.epochs * ((per_epoch - 1) * (each + own) + last + own)
    compute_s = terms.epochs * ((per_epoch - 1) * ca + last_a) + iterations * own
    if workload.test_samples:
        evaluate = workload.evaluation_s(workload.test_samples / w, quota)
        loop_s, compute_s = loop_s + terms.epochs * evaluate, compute_s + terms.epochs * evaluate

    tiny_up, tiny_down = platform.seconds("up", TINY_MB, m), platform.seconds("down", TINY_MB, m)
    data_mb = workload.dataset_mb * larger / global_batch  # 3-13
    load = (
        tiny_up + tiny_down + np.maximum(platform.seconds("down", data_mb, m), tiny_down)
        + platform.seconds("down", workload.model_mb, m) + workload.first_cpu_s / share
    )  # fmt: skip
    finish = np.where(w > 1, tiny_up + tiny_down, 0.0) + platform.seconds("up", workload.model_mb, m)
    start = platform.start_s(w)
    behind = ca + e.seconds - cn
    hand = handing(workload, platform, terms, workers=w, aggregators=k, memory_mb=m, load=load, behind_s=behind)
    lives = lives_of(hand, each + own, iterations)
    relays, relay_s = lives.relays, lives.stops_s
    seconds = start + load + loop_s + relay_s + finish

    invocations = w * (1 + relays)
    saves = w * np.floor(iterations / terms.checkpoint_every)
    puts = iterations * e.puts + w * (START_PUTS + RELAY_PUTS * relays + 1) + saves + 3 + 2 * w
    gets = iterations * e.gets + w * (START_READS + RELAY_READS * relays) + w + np.maximum(w - 2, 0)
    polls = np.where(platform.poll_s > 0, platform.polls_per_get, 0.0) * iterations * e.gets + w * relays
    polls = polls + seconds / CONTROL_EVERY_S
    state = state_mb(workload)
    moved = iterations * e.moved_mb + w * (data_mb + 2 * workload.model_mb) + (saves + w * relays) * state
    gb_s = m / 1024 * w * (seconds + lives.twice_s)  # 3-23
    functions = gb_s * platform.price_gb_s
    requests = invocations * platform.price_invocation + puts * platform.price_put + (gets + polls) * platform.price_get
    kept_gb = np.maximum(kept_mb(workload, terms, w) / 1000, platform.least_kept_gb)
    hourly = platform.price_server_hour + kept_gb * platform.price_gb_hour
    storage = moved * platform.price_mb + hourly * seconds / 3600
    dies = dies_too_early(hand, each + own, iterations)
    return Prediction(
        seconds=np.where(dies, np.inf, seconds), cost_usd=np.where(dies, np.inf, functions + requests + storage),
        iteration_s=each + own,
        iterations=iterations, start_s=start, load_s=load, compute_s=compute_s, upload_s=iterations * e.upload_s,
        aggregate_s=iterations * e.aggregate_s + np.maximum(0.0, loop_s - compute_s - iterations * e.seconds),
        download_s=iterations * e.download_s + finish, relay_s=relay_s, invocations=invocations, puts=puts, gets=gets,
        polls=polls, functions_usd=functions, storage_usd=storage, requests_usd=requests,
        memory_needed_mb=workload.memory_needed_mb(larger),
    )  # fmt: skip


def kept_mb(workload: Workload, terms: ExecutionOptions, w: Array) -> Array:
    """MB that a channel holds at a time: data, weights, two checkpoints of each rank, two iterations' messages."""
    messages = 2 * workload.model_mb * (w * UP[terms.compression] + DOWN[terms.compression])
    return workload.dataset_mb + workload.model_mb + 2 * w * state_mb(workload) + np.where(w > 1, messages, 0.0)


def state_mb(workload: Workload) -> float:
    """MB of a checkpoint."""
    return workload.state_mb or workload.model_mb


def handing(
    workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, *, workers: Array, aggregators: Array, memory_mb: Array,
    load: Array, behind_s: Array,
) -> Handing:  # fmt: skip
    """Times of invocations and hand-offs for functions of a quota.

    Args:
        workload, platform, terms: what, where and how.
        workers, aggregators, memory_mb: W, K and M.
        load: seconds of loading of the first functions.
        behind_s: seconds from when the others have computed their first gradient until the aggregators end their iteration.
    """
    state, m, w, k = state_mb(workload), memory_mb, workers, aggregators
    write_s, request_s = platform.seconds("up", state, m), platform.seconds("up", TINY_MB, m)
    mixed: Array | bool = False
    if terms.sync == "hap":
        # Others upload, hand off and end; the environments of those that end before aggregators hand off are reused.
        ended_s = span_s(platform, "up", k, workload.model_mb * UP[terms.compression] / k, m) + write_s + request_s
        mixed = (w > k) & (2 * k > w) & (behind_s >= ended_s * (1 - CLOSE))
    return Handing(
        life_s=terms.lifetime_s or platform.lifetime_s, first_load_s=load,
        load_s=load - platform.seconds("down", workload.model_mb, m), write_s=write_s,
        read_s=platform.seconds("down", state, m), request_s=request_s, cold_s=platform.start_s(w),
        warm_s=platform.warm_start_s, waits=w > 1, mixed=mixed,
    )  # fmt: skip
