"""Scheduling of loads and deliveries: decisions only, no I/O, no thread, no clock.

    qmows           the scheduler of loaders: over-allocation, work stealing, leases, retries
    tasks           tasks and queues; the loader's side: its queue and its reports
    remote_buffer   the service's samples: reference counts, and a limit in bytes
    local_buffer    the trainer's batches: in order, once, and a limit in bytes; the bound on batches loaded ahead
    delivery        a job's positions: each exactly once, also after losses, repetitions and resumption
    autoscaler      the number of loaders

A service uses them together: `Delivery` determines the contents of future batches, `RemoteBuffer` which samples may be loaded,
`Scheduler` which loader loads them, and `autoscaler.decide` the number of loaders.
"""

from ephemeron.data.scheduler.autoscaler import Elastic, ElasticLimits, LoadCounters, decide
from ephemeron.data.scheduler.delivery import Answer, DeliveredBatch, Delivery, DeliveryRefused, EpochEnd, EpochPartition, Remainder
from ephemeron.data.scheduler.local_buffer import LocalBuffer, PrefetchWindow
from ephemeron.data.scheduler.qmows import Scheduler
from ephemeron.data.scheduler.remote_buffer import RemoteBuffer
from ephemeron.data.scheduler.tasks import (
    LoaderQueue,
    LoaderReply,
    LoaderReport,
    Losses,
    QueueOptions,
    TaskFailure,
    TaskRetryPolicy,
    TaskStatus,
)

__all__ = [
    "Answer",
    "DeliveredBatch",
    "Delivery",
    "DeliveryRefused",
    "Elastic",
    "ElasticLimits",
    "EpochEnd",
    "EpochPartition",
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
