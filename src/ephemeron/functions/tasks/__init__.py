"""Queue of small stateless tasks, and the functions that run them: the second way to use functions beside gang-scheduled runs.

    queue = ObjectQueue(channel, "RUN", owner="client")         # or RedisQueue(url, "RUN", owner="client")
    batch = [TaskSpec(id=f"t{n}", function="package.module:square", arguments={"n": n}) for n in range(100)]
    await queue.publish(batch)                                  # one object; a batch is what is leased
    reader = queue.reader()
    for result in await reader.read():                          # each task once: ok, dead or cancelled
        ...

Executors (`executor`) take batches with a lease, run their tasks, and record results in batches, too, so that a task of
milliseconds costs a fraction of a request. The design is NumPyWren's (section 2.4 of the survey: queue, leases, a provisioner
that follows the depth) with PyWren's results by reference. What differs: the visible result of a task is decided by create-only
appends to a log of its batch (or one atomic script), not by the lease. A lease only saves work, so clocks, late executors and calls
that are delivered twice cannot change a result.

Importing this package imports none of its modules: each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.functions.tasks.model import QueueDepth, TaskEdge, TaskLease, TaskResult, TaskSpec
    from ephemeron.functions.tasks.object_queue import ObjectQueue
    from ephemeron.functions.tasks.queue import ResultReader, TaskQueue
    from ephemeron.functions.tasks.redis_queue import RedisQueue

_LAZY = {
    "ObjectQueue": "object_queue",
    "QueueDepth": "model",
    "RedisQueue": "redis_queue",
    "ResultReader": "queue",
    "TaskEdge": "model",
    "TaskLease": "model",
    "TaskQueue": "queue",
    "TaskResult": "model",
    "TaskSpec": "model",
}

__all__ = ["ObjectQueue", "QueueDepth", "RedisQueue", "ResultReader", "TaskEdge", "TaskLease", "TaskQueue", "TaskResult", "TaskSpec"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
