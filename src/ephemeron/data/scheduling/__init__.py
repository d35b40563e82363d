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

from ephemeron.data.scheduling.dealing import Deal, Remainder
from ephemeron.data.scheduling.delivery import Answer, Batch, Delivery, EpochEnd, Refused
from ephemeron.data.scheduling.elastic import Counters, Elastic, ElasticLimits, decide
from ephemeron.data.scheduling.loader import LoaderQueue, Report
from ephemeron.data.scheduling.local import LocalBuffer
from ephemeron.data.scheduling.mirror import Losses, QueueOptions, Reply
from ephemeron.data.scheduling.prefetch import RemoteBuffer
from ephemeron.data.scheduling.qmows import Scheduler
from ephemeron.data.scheduling.tasks import Key, RetryPolicy, Status, Verdict

__all__ = [
    "Answer",
    "Batch",
    "Counters",
    "Deal",
    "Delivery",
    "Elastic",
    "ElasticLimits",
    "EpochEnd",
    "Key",
    "LoaderQueue",
    "LocalBuffer",
    "Losses",
    "QueueOptions",
    "Refused",
    "Remainder",
    "RemoteBuffer",
    "Reply",
    "Report",
    "RetryPolicy",
    "Scheduler",
    "Status",
    "Verdict",
    "decide",
]
