"""A function on a few items, in a process of its own: `python -m … FOLDER`. It is loaded as an executor's function loads it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.config.own_processes import peak_mb
from ephemeron.config.typed import plain
from ephemeron.errors import EphemeronError, JobError
from ephemeron.functions.entries import PRELOADS
from ephemeron.functions.shipped_code import CodeLoader, Shipped, dumps, with_own_paths
from ephemeron.functions.shipped_tasks import code_keys
from ephemeron.functions.tasks.item_calls import call_item
from ephemeron.user_code import frames_of, guarded, line_of, unpickled

RUN = "dry-run"
REQUEST_FILE = "request.pickle"
ENOUGH_S = 10.0
"""After this long no further item is begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedItem:
    """One call."""

    seconds: float
    cpu_s: float
    nbytes: int
    """Of its result, pickled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemTrial:
    """Result of the process, on its standard output as JSON."""

    load_s: float = 0.0
    """To unpack and import the function."""
    items: tuple[TriedItem, ...] = ()
    """The first one is that on which the function warms up."""
    peak_mb: float = 0.0
    error: str = ""
    """Why an item failed; empty: none did."""
    failed: int = 0
    """Which item."""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """What the process is asked, as a pickle."""

    reference: str
    """Of the function; see `CodeLoader.load`."""
    objects: Mapping[str, bytes]
    """That the reference needs, by key."""
    calls: Sequence[tuple[str, tuple[Any, ...], Mapping[str, Any]]]
    """See `FunctionExecutor.submit_items`."""
    seed: int | None = None
    within: str = ""
    """`module:function` of an installed module that is called with the function and each item; empty: the function is."""


def try_items(request: TrialRequest, folder: Path) -> ItemTrial:
    """Calls the function with each item, until `ENOUGH_S` have passed."""
    began = time.perf_counter()
    tried: list[TriedItem] = []
    try:
        with guarded():
            function, wrapper = asyncio.run(_loaded(request, folder))
        load_s = time.perf_counter() - began
        for call in request.calls:
            at, cpu = time.perf_counter(), time.process_time()
            with guarded():
                if wrapper is None:
                    outcome = call_item(function, *call, seed=request.seed, interval_s=0.0)
                    refused, nbytes = outcome.refused, len(outcome.text if outcome.data is None else outcome.data)
                else:
                    refused, nbytes = "", len(dumps(wrapper(function, *call[1]), what="the result"))
            if refused:
                raise JobError(refused)
            seconds, cpu_s = time.perf_counter() - at, time.process_time() - cpu
            tried.append(TriedItem(seconds=seconds, cpu_s=cpu_s, nbytes=nbytes))
            if time.perf_counter() - began > ENOUGH_S:
                break
    except EphemeronError as e:
        return ItemTrial(error=str(e), failed=len(tried))
    except Exception as e:  # noqa: BLE001 - the user's
        return ItemTrial(error=line_of(e), failed=len(tried), traceback=with_own_paths(frames_of(e, folder)))
    return ItemTrial(load_s=load_s, items=tuple(tried), peak_mb=peak_mb())


async def _loaded(request: TrialRequest, folder: Path) -> tuple[Shipped, Shipped | None]:
    store = MemoryChannel()
    for key, data in request.objects.items():
        store.publish(key, data)
    loader = CodeLoader(store, code_keys(RUN), scratch=folder)
    return await loader.load(request.reference), await loader.load(request.within) if request.within else None


def main(folder: Path) -> None:
    """Writes an `ItemTrial` to standard output; what the user's code prints goes to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    for name in PRELOADS["task-executor"]:
        import_module(name)
    request = unpickled((folder / REQUEST_FILE).read_bytes())
    json.dump(plain(try_items(request, folder.resolve())), out)


if __name__ == "__main__":
    from ephemeron.executor import item_trial as module

    module.main(Path(sys.argv[1]))
