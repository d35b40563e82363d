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
- cold starts, links between functions, loading, evaluation, hand-offs before the timeout and their checkpoints, the end of the run;
- every request that is billed: puts, reads, polls that find nothing, invocations; and what the CPU does to bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ephemeron.training.planner.model.direct_links import ENDPOINT_LISTS, ENDPOINT_PUTS
from ephemeron.training.planner.model.exchange import DOWN, TINY_MB, UP, ExecutionOptions, Numbers, broadcast, exchange, span_s
from ephemeron.training.planner.model.lives import Evaluations, Handing, dies_too_early, lives_of
from ephemeron.training.planner.model.profile import PlatformProfile, Workload
from ephemeron.training.planner.model.rates import Array

START_READS, START_PUTS = 5, 1
"""Specification, code, training and test data, initial weights; the lease."""
RELAY_PUTS, RELAY_READS = 4, 6
"""Claim, lease, checkpoint, position; specification, code, training and test data, position, checkpoint."""
CONTROL_EVERY_S = 2.0
"""Seconds between two checks of rank 0 for a stop request."""
CLOSE = 0.01
"""Relative difference of two times below which the less favourable order of the two events is assumed."""


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


def largest_nonaggregator_batch(
    workload: Workload,
    platform: PlatformProfile,
    terms: ExecutionOptions,
    *,
    workers: Numbers,
    aggregators: Numbers,
    memory_mb: Numbers,
    batch: Numbers,
) -> Array:
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
    lockstep_s = workload.lockstep_s(platform)
    if lockstep_s:
        together = np.minimum(k, w) if terms.sync == "hap" else w  # under HAP aggregators wait for each other only
        late = np.where(together > 1, lockstep_s / share, 0.0)
        each, last = each + late, last + late
    loop_s = terms.epochs * ((per_epoch - 1) * (each + own) + last + own)
    compute_s = terms.epochs * ((per_epoch - 1) * ca + last_a) + iterations * own
    evaluate: Array | float = 0.0
    if workload.test_samples:
        evaluate = workload.evaluation_s(workload.test_samples / w, quota)
        loop_s, compute_s = loop_s + terms.epochs * evaluate, compute_s + terms.epochs * evaluate

    tiny_up, tiny_down = platform.seconds("up", TINY_MB, m), platform.seconds("down", TINY_MB, m)
    data_mb = workload.dataset_mb * larger / global_batch  # 3-13
    load = (
        tiny_up
        + tiny_down
        + np.maximum(platform.seconds("down", data_mb, m), tiny_down)
        + platform.seconds("down", workload.model_mb, m)
        + workload.first_cpu_s / share
    )
    links = platform.direct
    if links is not None:
        load = load + links.setup(w)
    finish = np.where(w > 1, tiny_up + tiny_down, 0.0) + platform.seconds("up", workload.model_mb, m)
    start = platform.start_s(w)
    behind = ca + e.seconds - cn
    hand = handing(workload, platform, terms, workers=w, aggregators=k, memory_mb=m, load=load, behind_s=behind)
    lives = lives_of(hand, each + own, iterations, Evaluations(number=terms.epochs, seconds=evaluate))
    relays, relay_s = lives.relays, lives.stops_s
    seconds = start + load + loop_s + relay_s + finish

    invocations = w * (1 + relays)
    saves = w * np.floor(iterations / terms.checkpoint_every)
    puts = iterations * e.puts + w * (START_PUTS + RELAY_PUTS * relays + 1) + saves + 3 + 2 * w
    gets = iterations * e.gets + w * (START_READS + RELAY_READS * relays) + w + np.maximum(w - 2, 0)
    polls = np.where(platform.poll_s > 0, platform.polls_per_get, 0.0) * iterations * e.gets + w * relays
    polls = polls + seconds / CONTROL_EVERY_S
    direct_usd: Array | float = 0.0
    if links is not None:
        joined = np.where(w > 1, invocations, 0.0)
        puts = puts + ENDPOINT_PUTS * joined
        gets = gets + (w - 1) * joined
        direct_usd = (
            iterations * e.direct_mb * links.price_mb
            + ENDPOINT_LISTS * joined * platform.price_list
            + np.where(w > 1, links.price_service_hour * seconds / 3600, 0.0)
        )
    state = state_mb(workload)
    moved = iterations * e.moved_mb + w * (data_mb + 2 * workload.model_mb) + (saves + w * relays) * state
    gb_s = m / 1024 * w * (seconds + lives.twice_s)  # 3-23
    functions = gb_s * platform.price_gb_s
    requests = invocations * platform.price_invocation + puts * platform.price_put + (gets + polls) * platform.price_get
    kept_gb = np.maximum(kept_mb(workload, platform, terms, w) / 1000, platform.least_kept_gb)
    hourly = platform.price_server_hour + kept_gb * platform.price_gb_hour
    storage = moved * platform.price_mb + hourly * seconds / 3600 + direct_usd
    dies = dies_too_early(hand, each + own, iterations, evaluate)
    return Prediction(
        seconds=np.where(dies, np.inf, seconds),
        cost_usd=np.where(dies, np.inf, functions + requests + storage),
        iteration_s=each + own,
        iterations=iterations,
        start_s=start,
        load_s=load,
        compute_s=compute_s,
        upload_s=iterations * e.upload_s,
        aggregate_s=iterations * e.aggregate_s + np.maximum(0.0, loop_s - compute_s - iterations * e.seconds),
        download_s=iterations * e.download_s + finish,
        relay_s=relay_s,
        invocations=invocations,
        puts=puts,
        gets=gets,
        polls=polls,
        functions_usd=functions,
        storage_usd=storage,
        requests_usd=requests,
        memory_needed_mb=memory_needed_mb(workload, platform, terms, larger),
    )


def kept_mb(workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, w: Array) -> Array:
    """MB that a store holds at a time: data, weights, two checkpoints of each rank, two iterations' messages."""
    share = 1.0 if platform.direct is None else platform.direct.failure
    messages = 2 * share * workload.model_mb * (w * UP[terms.compression] + DOWN[terms.compression])
    return workload.dataset_mb + workload.model_mb + 2 * w * state_mb(workload) + np.where(w > 1, messages, 0.0)


def memory_needed_mb(workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, batch: Array | float) -> Array:
    """FasDL, equation 4-1, and the versions that members of direct links keep."""
    return workload.memory_needed_mb(batch) + kept_by_member_mb(workload, platform, terms)


def largest_batch(workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, memory_mb: Array) -> Array:
    """FasDL, equation 4-2, likewise."""
    return workload.largest_batch(memory_mb - kept_by_member_mb(workload, platform, terms))


def kept_by_member_mb(workload: Workload, platform: PlatformProfile, terms: ExecutionOptions) -> float:
    """MB of versions that a function keeps for others, where they are connected directly."""
    if platform.direct is None or terms.pattern == "standalone":
        return 0.0
    return platform.direct.memory_mb(workload.model_mb * UP[terms.compression], workload.model_mb * DOWN[terms.compression])


def state_mb(workload: Workload) -> float:
    """MB of a checkpoint."""
    return workload.state_mb or workload.model_mb


def handing(
    workload: Workload,
    platform: PlatformProfile,
    terms: ExecutionOptions,
    *,
    workers: Array,
    aggregators: Array,
    memory_mb: Array,
    load: Array,
    behind_s: Array,
) -> Handing:
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
        life_s=terms.lifetime_s or platform.lifetime_s,
        first_load_s=load,
        load_s=load - platform.seconds("down", workload.model_mb, m),
        write_s=write_s,
        read_s=platform.seconds("down", state, m),
        request_s=request_s,
        cold_s=platform.start_s(w),
        warm_s=platform.warm_start_s,
        waits=w > 1,
        mixed=mixed,
    )
