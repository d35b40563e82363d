"""Lower bounds on one exchange: bytes over bandwidth plus latency times rounds."""

from __future__ import annotations

from ephemeron.job import Configuration
from ephemeron.units import MB


def round_bound_s(
    workers: int,
    aggregators: int,
    *,
    model_bytes: float,
    latency_s: float,
    bandwidth_mb_s: float,
    pipelined: bool = False,
) -> float:
    """Least seconds of one K-REDUCE round over links of the given latency and bandwidth in each direction.

    Plain form: the phases of FasDL equations 3-2 to 3-4 for an aggregator, one after the other, with an aggregator's
    own shard left out as in equations 3-24 and 3-25, and one latency per phase (four: upload, gather, publish,
    download). Pipelined form: the busier direction of the busiest worker's link; for K = W its downlink carries
    2·S·(W−1)/W bytes.

    Args:
        workers: W.
        aggregators: K.
        model_bytes: S, bytes exchanged.
        latency_s: per request.
        bandwidth_mb_s: MB/s (1e6 bytes) per direction.
        pipelined: which form.
    """
    if workers == 1:
        return 0.0
    w, k, s = workers, aggregators, model_bytes / (bandwidth_mb_s * MB)
    up, gather, publish, down = s * (k - 1) / k, s * (w - 1) / k, s / k, s * (k - 1) / k
    if pipelined:
        aggregator = max(up + publish, gather + down)
        other = s if k < w else 0.0  # a non-aggregator sends everything and reads everything
        return max(aggregator, other) + 4 * latency_s
    # non-aggregators upload the whole vector, and no aggregator can have gathered before they are through
    upload = s if k < w else up
    return upload + gather + publish + (s if k < w else down) + (4 if k > 1 or w > k else 3) * latency_s


def iteration_lower_bound_s(
    configuration: Configuration, *, model_bytes: int, latency_s: float, bandwidth_mb_s: float | None,
    compute: dict[str, float] | None,
) -> float:  # fmt: skip
    """Least seconds of one iteration: computing the smaller batch, and each byte over the link once.

    Under any synchronisation protocol every worker sends its vector and reads the merged one (equation 3-11);
    these may overlap each other, so the longer one counts.
    """
    c = configuration
    seconds = 0.0
    if c.workers > 1 and bandwidth_mb_s:
        share = (c.aggregators - 1) / c.aggregators if c.aggregators == c.workers else 1.0
        shrink = {"none": 1.0, "bf16": 0.5, "int8": 0.25}[c.compression]
        seconds += shrink * share * model_bytes / (bandwidth_mb_s * MB) + latency_s
    if compute is not None:
        batch = min(c.batch_size, c.nonaggregator_batch_size)
        seconds += compute["a"] * (batch + compute["b"]) / (c.memory_mb + compute["m"])
    return seconds
