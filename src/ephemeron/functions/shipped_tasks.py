"""What a task of `FunctionExecutor` does, from the queue's view. `TaskSpec.function` is `FORM FUNCTION` or `FORM FUNCTION COMBINE`:

    call REF             one call; the payload is a pickle of (args, kwargs)
    chunk REF            several calls; the payload is a pickle of a list of args, the result a list
    fold REF COMBINE     several calls, whose results are combined in their order: a leaf of a tree
    combine COMBINE      the inputs are results of other tasks, and are combined in their order: an inner node of a tree

References are those of `shipped_code.CodeLoader`. A large payload is the first input instead. Results are pickles. Everything comes
through a channel that has verified it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ephemeron.errors import JobError
from ephemeron.functions.shipped_code import CodeKeys, CodeLoader, Shipped, dumps, loads
from ephemeron.functions.tasks.model import TaskSpec
from ephemeron.functions.tasks.resolver import Resolver, ResolverContext, TaskFunction


def code_keys(run: str) -> CodeKeys:
    """Keys of the code of a run's tasks."""
    return CodeKeys(f"{run}.code")


class ShippedResolver(Resolver):
    """Runs shipped functions.

    Raises:
        JobError: the call has no key, so nothing from the store may be executed.
    """

    def __init__(self, context: ResolverContext) -> None:
        if not context.key:
            raise JobError("shipped code needs a call with the run's key", remedy="use FunctionExecutor")
        self._loader = CodeLoader(context.channel, code_keys(context.run), scratch=context.scratch)

    async def resolve(self, function: str) -> TaskFunction:
        form, _, names = function.partition(" ")
        if form not in _FORMS:
            raise JobError(f"no task of the form {form!r}")
        run, shipped = _FORMS[form], [await self._loader.load(name) for name in names.split(" ")]
        return lambda task, inputs: run(shipped, task, inputs)


def _arguments(task: TaskSpec, inputs: Sequence[memoryview]) -> Any:
    return loads(task.payload or inputs[0])


def _call(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    positional, named = _arguments(task, inputs)
    [function] = code
    return _result(function(*positional, **named))


def _chunk(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    [function] = code
    return _result([function(*each) for each in _arguments(task, inputs)])


def _fold(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    function, combine = code
    return _result(functools.reduce(combine, (function(*each) for each in _arguments(task, inputs))))


def _combine(code: Sequence[Shipped], task: TaskSpec, inputs: Sequence[memoryview]) -> bytes:
    [combine] = code
    return _result(functools.reduce(combine, map(loads, inputs)))


def _result(value: object) -> bytes:
    return dumps(value, what="the result")


_FORMS: dict[str, Callable[[Sequence[Shipped], TaskSpec, Sequence[memoryview]], bytes]] = {
    "call": _call, "chunk": _chunk, "fold": _fold, "combine": _combine,
}  # fmt: skip
