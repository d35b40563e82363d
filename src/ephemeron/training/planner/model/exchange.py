"""One exchange of the vector: FasDL equations 3-1 to 3-7, 3-11, 3-24 and 3-25, and the forms that they leave out.

Pure and vectorised, like `prediction`, which makes whole runs of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ephemeron.errors import JobError
from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.planner.model.profile import PlatformProfile, Workload
from ephemeron.training.planner.model.rates import Array

Numbers: TypeAlias = Array | float | int

PREDICTED = ("bsp", "hap")
"""Protocols under which every iteration waits for a set of contributions that is known beforehand."""
UP = {"none": 1.0, "bf16": 0.5, "int8": 0.2549, "sparse": 1.0}
"""Share of the bytes that a contribution keeps; int8 carries one float32 scale per 1,024 elements. Of sparse ones the most: how much of
a gradient is zero is not measured."""
DOWN = {"none": 1.0, "bf16": 0.5, "int8": 0.5, "sparse": 1.0}
"""Share of the bytes that a merged shard keeps: bf16 under int8."""
TINY_MB = 0.001
"""Leases, positions, specifications."""
GATHERED, UNDER_WAY_MB = 4, 3.0
"""Contributions that an aggregator fetches ahead, or as many as these MB are."""
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
    """Through the store."""
    direct_mb: Array
    """Sent over direct links by all functions together."""

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
    platform: PlatformProfile,
    direction: Any,
    objects: Numbers,
    size_mb: Numbers,
    memory_mb: Numbers,
    parallel: Numbers = math.inf,
    alone: Array | None = None,
) -> Array:
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
    workload: Workload, platform: PlatformProfile, terms: ExecutionOptions, *, workers: Numbers, aggregators: Numbers, memory_mb: Numbers
) -> Exchange:
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
    links = platform.direct
    if links is not None:
        return _shaped(shape, *_over_links(workload, platform, links, terms, w, m, cpu, wait))
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
    whole = values if len(values) == len(Exchange.__slots__) else (*values, 0.0)  # nothing goes over direct links
    return Exchange(*(x if np.shape(x) == shape else np.broadcast_to(x, shape) for x in whole))  # type: ignore[arg-type]


def _moved_mb(workload: Workload, terms: ExecutionOptions, w: Array) -> Array:
    """Both ways: every contribution but an aggregator's own shard, and every merged shard once up and W − 1 times down."""
    return workload.model_mb * (2 * (w - 1) * UP[terms.compression] + w * DOWN[terms.compression])


def _over_links(
    workload: Workload, platform: PlatformProfile, links: DirectLinks, terms: ExecutionOptions, w: Array, m: Array, cpu: Array, wait: Array
) -> tuple[Numbers, ...]:
    """Every rank owns one part: the equations of `direct_links`, with pairs that need the store at their expected share."""
    up, down = workload.model_mb * UP[terms.compression], workload.model_mb * DOWN[terms.compression]
    share = np.minimum(m / platform.mb_per_vcpu, 1.0)
    sending, adding = links.s_per_mb(share), links.s_per_mb(share, cpu)
    unpacking = sending if terms.compression == "none" else adding
    whole = links.one_phase(w, workload.model_mb) & (terms.compression != "int8")
    others, messages = w - 1, links.through_store(w, whole)
    by_store = np.maximum(others * links.failure, 1.0)  # of a rank's messages of a phase, where some pair needs the store

    def phase(received_mb: Array, object_mb: Array | float, each: Array) -> Array:
        """Expected seconds in which a rank sends and receives so many MB."""
        direct = links.latency_s + received_mb * each
        stored = wait + span_s(platform, "up", by_store, object_mb, m) + span_s(platform, "down", by_store, object_mb, m)
        return np.asarray(direct + links.some_fails(w) * np.maximum(stored - direct, 0.0))

    part = others / w
    first, second = phase(part * up, up / w, sending), phase(part * down, down / w, unpacking)
    once = phase(others * up, up, sending)
    each_mb = np.where(whole, 2 * up, (up + down) / w)  # a put and a get of each message that is stored
    found = (
        np.where(whole, 0.0, first),
        np.where(whole, others * up, part * up) * (adding - sending),
        np.where(whole, once, second),
        0.0,
        messages,
        messages,
        each_mb * messages,
        (1 - links.failure) * np.where(whole, w * others * up, others * (up + down)),
    )
    return tuple(np.where(w > 1, x, 0.0) for x in found)


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
