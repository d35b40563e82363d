"""What the function of the tests runs: the contract's entries, loaded from their file.

The deployed package has no `ephemeron.testing`, and should not have.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[3] / "src" / "ephemeron" / "testing" / "platform_entries.py"
_spec = importlib.util.spec_from_file_location("platform_entries", _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


async def dispatch(context: Any) -> dict[str, Any]:
    mine = globals().get(context.call.options["entry"])
    out: dict[str, Any] = await (mine or getattr(_module, context.call.options["entry"]))(context)
    return out


async def whoami(context: Any) -> dict[str, Any]:
    names = context.call.options.get("variables", ())
    return {"pid": os.getpid(), "cold": context.cold, "env": {name: os.environ.get(name) for name in names}}


async def leave_thread(context: Any) -> dict[str, Any]:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return await whoami(context)


async def has(context: Any) -> dict[str, Any]:
    return {"has": [name in os.environ for name in context.call.options["variables"]]}
