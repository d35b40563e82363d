"""Functions that tests of the fork server run. `IMPORT_*` in the environment says what importing this module does."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ephemeron.events import Note
from ephemeron.functions.context import Context
from ephemeron.units import MIB

BALLAST = os.urandom(int(os.environ.get("IMPORT_MB", "0")) * MIB)
IMPORTED_BY = os.getpid()

if "IMPORT_FAILS" in os.environ:
    raise OSError(os.environ["IMPORT_FAILS"])
if "IMPORT_THREAD" in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if "IMPORT_ARRIVED" in os.environ:
    Path(os.environ["IMPORT_ARRIVED"], str(os.getpid())).touch()
    while not Path(os.environ["IMPORT_ARRIVED"], "go").exists():
        time.sleep(0.01)


async def dispatch(context: Context, request: Mapping[str, Any]) -> dict[str, Any]:
    if request.get("held"):
        await context.channel.get("go", deadline=context.deadline)
    out: dict[str, Any] = await globals()[request["function"]](context)
    return {"pid": os.getpid(), "parent": os.getppid(), "imported_by": IMPORTED_BY, "cold": context.cold, **out}


async def whoami(context: Context) -> dict[str, Any]:
    return {}


async def state(context: Context) -> dict[str, Any]:
    """Everything that a process gets from the one that made it."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": _opened(),
        "threads": [t.name for t in threading.enumerate()],
        "tasks": len(asyncio.all_tasks()),
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)],
        "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "arguments": sys.argv[3:],
        "main": str(sys.modules["__main__"].__spec__.name),  # type: ignore[union-attr]
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "variables": dict(os.environ),
        "nice": os.nice(0),
        "path": sys.path,
    }


async def sockets(context: Context) -> dict[str, Any]:
    """Which these are, and stays until the key `go` is in the channel."""
    found = [name for name in _opened() if name.startswith("socket")]
    context.emit(Note(t=0.0, text=" ".join(found)))
    await context.channel.get("go", deadline=context.deadline)
    return {"sockets": found}


async def draw(context: Context) -> dict[str, Any]:
    import numpy
    import torch

    return {
        "drawn": [random.random(), float(numpy.random.random()), float(torch.rand(1, dtype=torch.float64))],
        "threads": torch.get_num_threads(),
        "sum": float(torch.ones(512, 512).matmul(torch.ones(512, 512)).sum()),
    }


async def allocate(context: Context) -> dict[str, Any]:
    kept = os.urandom(int(context.call.request["mb"]) * MIB)
    return {"kept": len(kept)}


async def memory(context: Context) -> dict[str, Any]:
    """MB of this process that it shares with others: private pages, and all."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kb = {line.split(":")[0]: int(line.split()[1]) for line in rollup}
    return {"shared": kb["Shared_Dirty"] / 1024, "private": kb["Private_Dirty"] / 1024, "all": kb["Rss"] / 1024}


async def use_code(context: Context) -> dict[str, Any]:
    """Imports code that came with the call."""
    assert context.scratch is not None
    (context.scratch / "users_code.py").write_text(context.call.request["code"])
    sys.path.insert(0, str(context.scratch))
    return {"value": importlib.import_module("users_code").VALUE}


async def leave_orphan(context: Context) -> dict[str, Any]:
    shell = await asyncio.create_subprocess_shell("sleep 0.05 & echo $!", stdout=asyncio.subprocess.PIPE)
    assert shell.stdout is not None
    orphan = int(await shell.stdout.readline())
    await shell.wait()
    return {"orphan": orphan}


def _opened() -> list[str]:
    """What descriptors are of; the folder that is read for it not."""
    out = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            out.append(os.readlink(fd))
        except OSError:
            pass
    return out
