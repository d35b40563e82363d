"""What the function of the tests runs: the contract's entries, loaded from their file.

The image's package has no `ephemeron.testing`, and should not have.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[3] / "src" / "ephemeron" / "testing" / "platform_entries.py"
_spec = importlib.util.spec_from_file_location("platform_entries", _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["platform_entries"] = _module
_spec.loader.exec_module(_module)


async def dispatch(context: Any) -> dict[str, Any]:
    mine = globals().get(context.call.request["entry"])
    out: dict[str, Any] = await (mine or getattr(_module, context.call.request["entry"]))(context)
    return out


async def whoami(context: Any) -> dict[str, Any]:
    """Its process, and what it finds in its environment."""
    names = context.call.request.get("variables", ())
    return {"pid": os.getpid(), "cold": context.cold, "env": {name: os.environ.get(name) for name in names}}


async def say_aloud(context: Any) -> dict[str, Any]:
    """Prints."""
    print("what the user printed")
    return {}
