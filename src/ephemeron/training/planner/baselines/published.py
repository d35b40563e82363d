"""Time and cost by the equations of the FasDL thesis, 3-1 to 3-29, exactly as published: for comparison with its tables."""

from __future__ import annotations

import numpy as np

from ephemeron.training.planner.model.exchange import ExecutionOptions, Numbers, broadcast
from ephemeron.training.planner.model.prediction import Prediction
from ephemeron.training.planner.model.profile import PlatformProfile, Workload


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
