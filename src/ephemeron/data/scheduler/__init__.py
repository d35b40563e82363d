"""Who loads which sample when, and what is handed to whom: decisions only, no I/O, no thread, no clock.

    qmows     loaders: queue mirrors, over-allocation, stealing, leases, retries, poison (with tasks, mirror)
    loader    the loader's own end of that: its queue and its reports
    prefetch  the service's objects: reference counts, and a limit in bytes (with sizes)
    local     the trainer's batches: in order, once, and a limit in bytes
    delivery  a job's positions: each exactly once, whatever is lost, repeated or resumed (with dealing)
    elastic   how many loaders there should be

A service drives them: `Delivery` says what is in the batches to come, `RemoteBuffer` which of it may be loaded,
`Scheduler` who does so, and `elastic.decide` how many there are to do it.
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
