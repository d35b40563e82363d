"""Results of a graph of tasks, in the order in which the client happens to read them."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from ephemeron.communication.channels import MemoryChannel
from ephemeron.errors import TaskFailed
from ephemeron.executor.futures import TaskFuture
from ephemeron.executor.graphs import Graph
from ephemeron.functions.tasks import ObjectQueue, TaskEdge, TaskResult, TaskSpec
from ephemeron.functions.tasks.batch_state import failed_first


def chain() -> list[TaskResult]:
    """What a queue has of a task that fails and of two that need it."""

    async def main() -> list[TaskResult]:
        queue = ObjectQueue(MemoryChannel(), "q", owner="one")
        await queue.publish([TaskSpec(id="g-a", function="f", max_tries=1, then=("x",))])
        await queue.connect(TaskEdge(name="x", inputs=1, tasks=(TaskSpec(id="g-b", function="f", then=("y",)),)))
        await queue.connect(TaskEdge(name="y", inputs=1, tasks=(TaskSpec(id="g-c", function="f"),)))
        [lease] = await queue.take(1)
        await queue.complete(lease, [TaskResult(id="g-a", status="failed", error="E: it is dead: no", traceback="where")])
        return sorted(await queue.reader().read(), key=lambda result: result.id)

    return asyncio.run(main())


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_the_error_of_a_graph_is_that_of_the_task_which_failed_itself(order):
    results = chain()
    assert [result.id for result in results] == ["g-a", "g-b", "g-c"]
    assert [failed_first(result).id for result in results] == ["g-a"] * 3
    future = TaskFuture("g", name="g", on_cancel=lambda future: None)
    graph = Graph(name="g", tasks=3, key="k", data=b"", objects={}, starts=iter(()), future=future, on_result=lambda result: None)
    for at in order:
        graph.absorb(results[at])
    with pytest.raises(TaskFailed, match=r"^E: it is dead: no") as raised:
        future.result(0)
    assert raised.value.task == "g-a"
