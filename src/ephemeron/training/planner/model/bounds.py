"""Lower bounds on one exchange: bytes over bandwidth plus latency times rounds; and on how many functions a model takes."""

from __future__ import annotations

import math

from ephemeron.functions.world import ComputeModel
from ephemeron.training.job import Configuration
from ephemeron.units import MB

RUNTIME_MB = 230
"""Resident megabytes of a function that has imported PyTorch and done nothing (measured: torch 2.13, CPU)."""
MOST_STAGES = 64
SHORTER_EVALUATIONS = "use a longer timeout, more functions or more memory for each, or a smaller test_fraction"
"""Remedies where an evaluation does not fit one function's life."""


def round_bound_s(
    workers: int, aggregators: int, *, model_bytes: float, latency_s: float, bandwidth_mb_s: float, pipelined: bool = False
) -> float:
    """Least seconds of one K-REDUCE round over links of the given latency and bandwidth in each direction.

    Nothing can be faster that sends these messages over such links, for any store: a put's last byte is up
    one latency and its transfer after the request, an object exists only once it is whole, and a reader who has
    asked before gets its first byte at once. Computing and the store itself cost nothing. With S the seconds that
    the whole vector takes on a link and L the latency:

    Plain form, the phases of FasDL equations 3-2 to 3-4 one after the other, with an aggregator's own shard left
    out as in equations 3-24 and 3-25. An aggregator uploads K − 1 shards (L + S(K−1)/K), only then asks for W − 1
    contributions (L + S(W−1)/K), and publishes their sum (L + S/K). Nothing merged exists before; then those who
    aggregate nothing have K shards to read on an idle link (S), or, if all aggregate, every rank K − 1. With K = 1
    the aggregator uploads nothing and has asked long before the first contribution exists, at L + S.

    Pipelined form, pieces as small as you like, everything at once. Three chains, the longest one counts. The
    aggregator's downlink is idle for one latency and then carries W − 1 contributions and K − 1 merged shards. The
    last contribution of the busiest sender is up at L + S (all aggregate: L + S(K−1)/K), and what it goes into
    is published one latency later. And so is what an aggregator makes of the last of its contributions.

    Args:
        workers: W.
        aggregators: K.
        model_bytes: bytes exchanged.
        latency_s: per request.
        bandwidth_mb_s: MB/s (1e6 bytes) per direction.
        pipelined: which form.
    """
    if workers == 1:
        return 0.0
    w, k, shard = workers, aggregators, model_bytes / aggregators / (bandwidth_mb_s * MB)
    sent = k if k < w else k - 1  # shards that leave the busiest sender as contributions; as many come back merged
    if pipelined:
        downlink = latency_s + (w - 1 + k - 1) * shard
        return max(downlink, 2 * latency_s + max(sent, w - 1) * shard)
    requests = 3 if k > 1 else 2
    return requests * latency_s + (max(k - 1, 1) + (w - 1) + 1 + sent) * shard


def iteration_lower_bound_s(
    configuration: Configuration, *, model_bytes: int, latency_s: float, bandwidth_mb_s: float | None, compute: ComputeModel | None
) -> float:
    """Least seconds of one iteration: computing the smaller batch, and each byte over the link once.

    Under any synchronisation protocol every worker sends its vector and reads the merged one (equation 3-11);
    these may overlap each other, so the longer one counts.
    """
    c = configuration
    seconds = 0.0
    if c.workers > 1 and bandwidth_mb_s:
        share = (c.aggregators - 1) / c.aggregators if c.aggregators == c.workers else 1.0
        shrink = {"none": 1.0, "bf16": 0.5, "int8": 0.25, "sparse": 0.0}[c.exchange.compression]
        seconds += shrink * share * model_bytes / (bandwidth_mb_s * MB) + latency_s
    if compute is not None:
        batch = min(c.batch_size, c.nonaggregator_batch_size)
        seconds += compute.seconds(batch, c.memory_mb)
    return seconds


def fewest_stages(divided_mb: float, *, fixed_mb: float, most_mb: float) -> int | None:
    """The least number of functions on which a model fits, if it divides evenly; None: there is none up to MOST_STAGES.

    An estimate: a single large layer may need more than an even share, and activations that cross are not counted.

    Args:
        divided_mb: what is divided among them: parameters, gradients, the optimiser's states.
        fixed_mb: what each of them needs beside: the runtime, samples.
        most_mb: of one function.
    """
    room_mb = most_mb - fixed_mb
    if room_mb <= 0:
        return None
    found = math.ceil(divided_mb / room_mb)
    return found if found <= MOST_STAGES else None
