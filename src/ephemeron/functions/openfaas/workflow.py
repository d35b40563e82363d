"""Workflows of functions as documents: a directed acyclic graph of steps, each a call of one function (Cloudless-Training, section 3).

    {"name": "training", "steps": [
        {"name": "schedule", "function": "ephemeron"},
        {"name": "addresses", "function": "ephemeron"},
        {"name": "shanghai", "function": "ephemeron-sh", "after": ["schedule", "addresses"]}]}

A step is called when the steps that it comes after have answered, at the same time as all others of which that is true. Its request is what the document gives
(`request`); else the input of the workflow, for a first step; else the answer of the step before, or, of several, an object with each answer by the
step's name. The answer of a workflow is made in the same way from the steps that no other comes after. In such objects an answer that is JSON
is a value, any other a text.

A step that answers with a status other than 2xx ends the workflow: what runs goes on to its end, nothing else is called. Calls are not
repeated: only the caller knows whether that is safe. Pure but for `call`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ephemeron.config.typed import Form, Typed, build, plain
from ephemeron.errors import GatewayError, JobError

_NAME = Form(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "up to 63 small letters, digits and hyphens, a letter first")
_FUNCTION = Form(r"[a-z0-9]([a-z0-9.-]{0,125}[a-z0-9])?", "a function's name, or NAME.NAMESPACE")

CallStep = Callable[["WorkflowStep", bytes], Awaitable[tuple[int, bytes]]]
"""Calls the function of a step with a request; returns status and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowStep(Typed):
    """One call of a function."""

    name: Annotated[str, _NAME]
    """Name, unlike that of every other step."""
    function: Annotated[str, _FUNCTION]
    """Function that is called."""
    after: tuple[str, ...] = ()
    """Steps whose answers it needs."""
    request: Mapping[str, object] | None = None
    """Its request, as JSON; None: made from the answers before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow(Typed):
    """Steps and their order."""

    name: Annotated[str, _NAME]
    steps: tuple[WorkflowStep, ...]

    def step(self, name: str) -> WorkflowStep:
        """The step of a name.

        Raises:
            JobError: there is none.
        """
        for step in self.steps:
            if step.name == name:
                return step
        raise JobError(f"workflow {self.name} has no step {name!r}", remedy=f"steps are {', '.join(s.name for s in self.steps)}")

    @property
    def last(self) -> tuple[str, ...]:
        """Names of the steps that no other comes after."""
        needed = {name for step in self.steps for name in step.after}
        return tuple(step.name for step in self.steps if step.name not in needed)

    def to_json(self) -> dict[str, object]:
        """The document."""
        found: dict[str, object] = plain(self)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRun:
    """How a workflow ended."""

    answer: bytes
    answers: Mapping[str, bytes] = field(default_factory=dict)
    """By step."""


def parse_workflow(value: object, *, where: str = "workflow") -> Workflow:
    """A workflow from a document.

    Raises:
        JobError: an unknown or missing key, a wrong type or name, no steps, two steps of one name, a step after an unknown one, or a cycle, which is named.
    """
    if not isinstance(value, Mapping):
        raise JobError(f"{where} is {type(value).__name__}", remedy="give an object with name and steps")
    workflow = build(Workflow, value, where=where)
    if not workflow.steps:
        raise JobError(f"{where}: workflow {workflow.name} has no steps", remedy="give at least one")
    names = [step.name for step in workflow.steps]
    for step in workflow.steps:
        if names.count(step.name) > 1:
            raise JobError(f"{where}: two steps have the name {step.name!r}", remedy="give each a name of its own")
        for before in step.after:
            if before not in names:
                raise JobError(
                    f"{where}: step {step.name} comes after {before!r}, which is no step", remedy=f"steps are {', '.join(names)}"
                )
    if cycle := _cycle(workflow.steps):
        raise JobError(f"{where}: steps wait for each other: {' after '.join(cycle)}", remedy="leave one of these out")
    return workflow


def _cycle(steps: Sequence[WorkflowStep]) -> list[str]:
    """Names of a cycle, the first one again at the end; empty: there is none."""
    after = {step.name: step.after for step in steps}
    done: set[str] = set()
    for start in after:
        path: list[str] = []
        pending = [(start, iter(after[start]))] if start not in done else []
        while pending:
            name, rest = pending[-1]
            if not path or path[-1] != name:
                path.append(name)
            following = next(rest, None)
            if following is None:
                done.add(name)
                path.pop()
                pending.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                pending.append((following, iter(after[following])))
    return []


def undeployed(workflow: Workflow, functions: Sequence[str]) -> str:
    """What is said of a workflow whose functions are not all deployed; empty: they are.

    Args:
        workflow: valid.
        functions: names of those that are deployed.
    """
    for step in workflow.steps:
        if step.function.partition(".")[0] not in functions:
            return f"step {step.name} calls function {step.function!r}, which is not deployed"
    return ""


async def execute(workflow: Workflow, body: bytes, call: CallStep) -> WorkflowRun:
    """Calls all steps in their order.

    Args:
        workflow: valid.
        body: input.
        call: calls a function.

    Raises:
        GatewayError: a step has answered with its status; names the step.
    """
    answers: dict[str, bytes] = {}
    running: dict[asyncio.Task[tuple[int, bytes]], WorkflowStep] = {}
    waiting = list(workflow.steps)
    failed: GatewayError | None = None
    try:
        while True:
            ready = [] if failed else [step for step in waiting if all(name in answers for name in step.after)]
            for step in ready:
                waiting.remove(step)
                running[asyncio.ensure_future(call(step, _request(step, body, answers)))] = step
            if not running:
                break
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                step = running.pop(task)
                status, answer = task.result()
                if 200 <= status < 300:
                    answers[step.name] = answer
                else:
                    failed = failed or GatewayError(status, f"step {step.name}: {answer.decode(errors='replace')[:200]}")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if failed is not None:
        raise failed
    return WorkflowRun(answer=_joined(workflow.last, answers), answers=answers)


def _request(step: WorkflowStep, body: bytes, answers: Mapping[str, bytes]) -> bytes:
    if step.request is not None:
        return json.dumps(plain(step.request)).encode()
    return _joined(step.after, answers) if step.after else body


def _joined(names: Sequence[str], answers: Mapping[str, bytes]) -> bytes:
    if len(names) == 1:
        return answers[names[0]]
    return json.dumps({name: _value(answers[name]) for name in names}).encode()


def _value(answer: bytes) -> object:
    try:
        return json.loads(answer)
    except ValueError:
        return answer.decode(errors="replace")
