"""What a task of `FunctionExecutor` does, from the queue's view. `TaskSpec.function` is `FORM FUNCTION` or `FORM FUNCTION COMBINE`:

    call REF             one call; the payload is a pickle of (args, kwargs)
    item REF             one call of a durable map; the payload is a pickle of the arguments of `call_item`
    chunk REF            several calls; the payload is a pickle of a list of args, the result a list
    fold REF COMBINE     several calls, whose results are combined in their order: a leaf of a tree
    combine COMBINE      the inputs are results of other tasks, and are combined in their order: an inner node of a tree
    node OPEN DIGEST     a node of a graph that functions compute: OPEN, a coroutine function, makes the `ShippedGraph` of a signed object
    within WRAPPER REF   one call by a function of an installed module: `WRAPPER(task, function, *args, **kwargs)`, where `task` is the
                         `RunningTask`, which reports values and is interrupted when it is cancelled

References are those of `shipped_code.CodeLoader`. A large payload is the first input instead; the other inputs are parts of it
that were sent apart. Results are pickles, and so are exceptions of tasks that can be pickled. Everything comes
through a channel that has verified it.
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ephemeron.errors import ChannelEmptied, JobError, UserError
from ephemeron.functions.shipped_code import CodeKeys, CodeLoader, Shipped, dumps
from ephemeron.functions.tasks.item_calls import call_item
from ephemeron.functions.tasks.model import TaskEdge, TaskSpec
from ephemeron.functions.tasks.resolver import Resolver, ResolverContext, TaskFunction, TaskOrder
from ephemeron.functions.tasks.result_store import INLINE_BYTES
from ephemeron.functions.tasks.running_task import RunningTask
from ephemeron.user_code import unpickled

WITHIN = "within"


def code_keys(run: str) -> CodeKeys:
    """Keys of the code of a run's tasks."""
    return CodeKeys(f"{run}.code")


class ShippedGraph(TaskOrder, ABC):
    """Tasks of which each knows those that follow it: a graph that is never written down whole."""

    @abstractmethod
    def run(self, task: TaskSpec, inputs: Sequence[memoryview]) -> object:
        """Computes a node; see `resolver.TaskFunction`. There are no inputs for a task that is stored."""

    @abstractmethod
    def edges(self, task: TaskSpec) -> Sequence[TaskEdge]:
        """See `Resolver.edges`."""


Load: TypeAlias = Callable[[str], Awaitable[Shipped]]
"""Gives the code of a reference; see `CodeLoader.load`."""


def graph_key(run: str, digest: str) -> str:
    """Key of the object from which functions make a graph."""
    return f"{run}.code/graph.{digest}"


class ShippedResolver(Resolver):
    """Runs shipped functions.

    Raises:
        JobError: the call has no key, so nothing from the store may be executed.
    """

    def __init__(self, context: ResolverContext) -> None:
        if not context.key:
            raise JobError("shipped code needs a call with the run's key", remedy="use FunctionExecutor")
        self._loader = CodeLoader(context.channel, code_keys(context.run), scratch=context.scratch)
        self._channel, self._run, self._reporting = context.channel, context.run, context.reporting
        self._graphs: dict[str, ShippedGraph] = {}

    async def resolve(self, function: str) -> TaskFunction:
        form, _, names = function.partition(" ")
        if form == "node":
            graph = self._graphs[function] = await self._open_graph(*names.split(" "))
            return graph.run
        if form == WITHIN:
            wrapper, called = [await self._loader.load(name) for name in names.split(" ")]
            loop = asyncio.get_running_loop()
            return lambda task, inputs: _within(wrapper, called, self._running(task, loop), task, inputs)
        if form not in _FORMS:
            raise JobError(f"no task of the form {form!r}")
        run, shipped = _FORMS[form], [await self._loader.load(name) for name in names.split(" ")]
        return lambda task, inputs: run(shipped, task, inputs)

    def encode_error(self, error: Exception) -> bytes:
        try:
            data = dumps(error, what="the exception")
        except UserError:
            return b""
        return data if len(data) <= INLINE_BYTES else b""

    def _running(self, task: TaskSpec, loop: asyncio.AbstractEventLoop) -> RunningTask:
        return RunningTask(task.id, run=self._run, channel=self._channel, reporting=self._reporting, loop=loop)

    async def is_cancelled(self, task: TaskSpec) -> bool:
        return task.function.startswith(f"{WITHIN} ") and await self._running(task, asyncio.get_running_loop()).look()

    async def _open_graph(self, reference: str, digest: str) -> ShippedGraph:
        opener, key = await self._loader.load(reference), graph_key(self._run, digest)
        data = await self._channel.fetch(key)
        if data is None:
            raise ChannelEmptied("the store has lost a graph of tasks", key=key)
        graph: ShippedGraph = await opener(bytes(data), self._channel, self._loader.load)
        return graph

    def edges(self, task: TaskSpec) -> Sequence[TaskEdge]:
        graph = self._graphs.get(task.function)
        return () if graph is None else graph.edges(task)

    def readers(self, task: TaskSpec) -> Mapping[str, int]:
        graph = self._graphs.get(task.function)
        return {} if graph is None else graph.readers(task)

    def is_stored(self, task: TaskSpec) -> bool:
        graph = self._graphs.get(task.function)
        return graph is not None and graph.is_stored(task)

    async def look_again(self, task: TaskSpec) -> bool:
        graph = self._graphs.get(task.function)
        return graph is not None and await graph.look_again(task)

    async def unread(self, task: TaskSpec) -> Sequence[str]:
        graph = self._graphs.get(task.function)
        return () if graph is None else await graph.unread(task)


def _arguments(task: TaskSpec, inputs: Sequence[memoryview]) -> Any:
    return unpickled(task.payload, inputs) if task.payload else unpickled(inputs[0], inputs[1:])


def _call(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    positional, named = _arguments(task, inputs)
    [function] = code
    return _result(function(*positional, **named))


def _item(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    [function] = code
    (*arguments, seed, interval_s), _ = _arguments(task, inputs)
    return _result(tuple(call_item(function, *arguments, seed=seed, interval_s=interval_s)))


def _within(wrapper: Shipped, function: Shipped, running: RunningTask, task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    positional, named = _arguments(task, inputs)
    running.begin()
    return _result(wrapper(running, function, *positional, **named))


def _chunk(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    [function] = code
    return _result([function(*each) for each in _arguments(task, inputs)])


def _fold(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    function, combine = code
    return _result(functools.reduce(combine, (function(*each) for each in _arguments(task, inputs))))


def _combine(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    [combine] = code
    return _result(functools.reduce(combine, map(unpickled, inputs)))


def _result(value: object) -> bytes:
    return dumps(value, what="the result")


_FORMS: dict[str, Callable[[Sequence[Shipped], TaskSpec, Sequence[memoryview]], bytes]] = {
    "call": _call,
    "item": _item,
    "chunk": _chunk,
    "fold": _fold,
    "combine": _combine,
}
