"""Scheduling of sample loading and delivery to ranks: decisions only, no I/O, no thread, no clock.

    qmows            loaders: queue states, over-allocation, stealing, leases, retries, poisoned samples
                     (with tasks, loader_state)
    loader           the loader's side of QMOWS: its queue and its reports
    remote_buffer    the service's objects: reference counts, and a limit in bytes (with sizes)
    local_buffer     the trainer's batches: in order, once, and a limit in bytes
    prefetch_window  bound on batches loaded ahead, in number and in bytes
    delivery         a job's positions: each exactly once under loss, repetition and resumption (with epoch_partition)
    autoscaler       number of loaders

A service drives them: `Delivery` gives the contents of the batches to come, `RemoteBuffer` the samples of them that may
be loaded, `Scheduler` the loader of each sample, and `autoscaler.decide` the number of loaders.
"""

from ephemeron.data.scheduler.autoscaler import Elastic, ElasticLimits, LoadCounters, decide
from ephemeron.data.scheduler.delivery import Answer, DeliveredBatch, Delivery, DeliveryRefused, EpochEnd
from ephemeron.data.scheduler.epoch_partition import EpochPartition, Remainder
from ephemeron.data.scheduler.loader import LoaderQueue, LoaderReport
from ephemeron.data.scheduler.loader_state import LoaderReply, Losses, QueueOptions
from ephemeron.data.scheduler.local_buffer import LocalBuffer
from ephemeron.data.scheduler.prefetch_window import PrefetchWindow
from ephemeron.data.scheduler.qmows import Scheduler
from ephemeron.data.scheduler.remote_buffer import RemoteBuffer
from ephemeron.data.scheduler.tasks import Key, TaskFailure, TaskRetryPolicy, TaskStatus

__all__ = [
    "Answer",
    "DeliveredBatch",
    "Delivery",
    "DeliveryRefused",
    "Elastic",
    "ElasticLimits",
    "EpochEnd",
    "EpochPartition",
    "Key",
    "LoadCounters",
    "LoaderQueue",
    "LoaderReply",
    "LoaderReport",
    "LocalBuffer",
    "Losses",
    "PrefetchWindow",
    "QueueOptions",
    "Remainder",
    "RemoteBuffer",
    "Scheduler",
    "TaskFailure",
    "TaskRetryPolicy",
    "TaskStatus",
    "decide",
]
