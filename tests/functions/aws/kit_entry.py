"""What the function of the tests runs: the contract's entries, loaded from their file.

The deployed package has no `ephemeron.testing`, and should not have.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[3] / "src" / "ephemeron" / "testing" / "platform_entries.py"
_spec = importlib.util.spec_from_file_location("platform_entries", _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["platform_entries"] = _module
_spec.loader.exec_module(_module)


globals().update({name: getattr(_module, name) for name in _module.NAMES})
ENTRIES = _module.declaration("kit_entry", (*_module.NAMES, "whoami", "leave_thread", "has"))


@dataclass(frozen=True, kw_only=True)
class VariablesRequest:
    """Names of environment variables."""

    variables: tuple[str, ...] = ()


async def whoami(context: Any, request: VariablesRequest) -> dict[str, Any]:
    env = {name: os.environ.get(name) for name in request.variables}
    return {"pid": os.getpid(), "cold": context.cold, "env": env}


async def leave_thread(context: Any, request: VariablesRequest) -> dict[str, Any]:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return await whoami(context, request)


async def has(context: Any, request: VariablesRequest) -> dict[str, Any]:
    return {"has": [name in os.environ for name in request.variables]}
