"""Entries: the kinds of work that a deployed function serves. Each call names one of them (`Call.entry`).

An entry is an async function of a `Context` and a request, a frozen dataclass, which returns a result, a frozen dataclass too:

    async def run_probe(ctx: Context, request: ProbeRequest) -> ProbeResult: ...

`serve` reads the request from the call as the entry's annotation has it, and returns the result as JSON. A new entry is one line
of the table and one module; modules are imported on first use, so that each layer may have entries.

A deployment may add entries, or replace those of the table, with the environment variable `EPHEMERON_ENTRIES`:
`name=module:function,…`. Clients of such a deployment set it too. A call cannot: it names an entry, and no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib import import_module
from inspect import signature
from typing import Any, TypeAlias, get_type_hints

from ephemeron.config.typed import convert, near, plain
from ephemeron.errors import InvocationRefused, JobError
from ephemeron.functions.context import Context

Entry: TypeAlias = Callable[[Context, Any], Awaitable[object]]

_TABLE = {
    "worker": "ephemeron.training.worker.loop:run_worker",
    "stage": "ephemeron.training.worker.pipeline.stage:run_stage",
    "probe": "ephemeron.training.worker.probe:run_probe",
    "loader": "ephemeron.data.service.loader:run_loader",
    "task-executor": "ephemeron.functions.tasks.executor_entry:run_task_executor",
    "sparse-shard": "ephemeron.sparse.store.functions:run_sparse_shard",
    "sparse-part": "ephemeron.sparse.job.function:run_sparse_part",
    "regions-link-probe": "ephemeron.regions.link_probe:run_link_probe",
    "driver": "ephemeron.runs.driver_function:run_driver",
}
ENTRIES = tuple(_TABLE)
"""Names of the entries that every deployment serves."""
VARIABLE = "EPHEMERON_ENTRIES"
PRELOAD_VARIABLE = "EPHEMERON_PRELOAD"
_WORKER = (
    "torch",
    "numpy.random",
    "ephemeron.training.worker.loop",
    "ephemeron.training.worker.trainers.torch_trainer",
    "ephemeron.communication.channels.object_store",
)
PRELOADS = {
    "worker": _WORKER,
    "probe": (*_WORKER, "ephemeron.training.worker.probe"),
    "loader": ("ephemeron.data.flow", "ephemeron.data.catalog", "ephemeron.data.service.loader"),
    "task-executor": ("ephemeron.functions.tasks.executor_entry", "ephemeron.functions.shipped_tasks", "numpy", "cloudpickle"),
    "predict": ("torch", "ephemeron.training.task.program"),
    "prepare": ("pyarrow.csv", "ephemeron.preparation.load_part", "ephemeron.preparation.fitting"),
    "sparse-part": ("ephemeron.sparse.job.function", "ephemeron.communication.channels.object_store", "scipy.sparse", "pyarrow.ipc"),
}
"""Modules that functions import before their first call, by what they compute; deployed ones import those of `worker`."""


def known(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """All entries: name to `module:function`.

    Args:
        variables: environment variables of the deployment; None: this process's.

    Raises:
        JobError: `EPHEMERON_ENTRIES` is not of its form.
    """
    entries = dict(_TABLE)
    for item in filter(None, (os.environ if variables is None else variables).get(VARIABLE, "").split(",")):
        name, equals, target = item.strip().partition("=")
        if not (name and equals and all(target.partition(":"))) or ":" in name:
            raise JobError(f"{VARIABLE} has {item!r}", remedy="use name=module:function, separated by commas")
        entries[name] = target
    return entries


def check_entry(entry: str, names: Collection[str] | None = None) -> None:
    """Refuses a call of an entry that the deployment does not have, so that nothing is started or imported for it.

    Args:
        entry: of the call.
        names: of the deployment's entries; None: those that this process knows.

    Raises:
        InvocationRefused: names the entry, and those that there are.
    """
    names = known() if names is None else names
    if entry not in names:
        raise InvocationRefused(f"no entry {entry!r}; {near(entry, names, what='entries')}", binding="entry")


def load(entry: str) -> Entry:
    """The function of an entry, imported on first use.

    Raises:
        InvocationRefused: there is no such entry; nothing is imported.
        ImportError, AttributeError: its code is not to be had here.
    """
    entries = known()
    check_entry(entry, entries)
    module, _, name = entries[entry].partition(":")
    function: Entry = getattr(import_module(module), name)
    return function


async def serve(context: Context, function: Entry | None = None) -> dict[str, object]:
    """Runs the entry that the call names; returns its result as a JSON object.

    Args:
        context: of the invocation.
        function: the entry's code; None: `load` finds it.

    Raises:
        InvocationRefused: there is no such entry.
        JobError: the call's request is not the entry's.
        TypeError, ValueError: the result is not a JSON object.
    """
    call = context.call
    function = load(call.entry) if function is None else function
    request = convert(_request_of(function), call.request, f"request of entry {call.entry}")
    result = plain(await function(context, request))
    if not isinstance(result, dict):
        raise TypeError(f"an entry returns a dataclass or a dict, not {type(result).__name__}")
    json.dumps(result)
    return result


def _request_of(function: Entry) -> Any:
    """The annotation of an entry's second argument."""
    _, request = signature(function).parameters
    return get_type_hints(function)[request]


def preload() -> None:
    """Imports the modules that `EPHEMERON_PRELOAD` names, separated by commas; those not installed are left out."""
    for name in filter(None, os.environ.get(PRELOAD_VARIABLE, ",".join(PRELOADS["worker"])).split(",")):
        try:
            import_module(name)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{name}.".startswith(f"{e.name}."):
                raise
