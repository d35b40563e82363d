"""What the function of the tests runs: the contract's entries, loaded from their file.

The image's package has no `ephemeron.testing`, and should not have.
"""

from __future__ import annotations

import importlib.util
import os
import sys
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
ENTRIES = _module.declaration("faas_entry", (*_module.NAMES, "whoami", "say_aloud"))


@dataclass(frozen=True, kw_only=True)
class VariablesRequest:
    """Names of environment variables."""

    variables: tuple[str, ...] = ()


async def whoami(context: Any, request: VariablesRequest) -> dict[str, Any]:
    """Its process, and what it finds in its environment."""
    env = {name: os.environ.get(name) for name in request.variables}
    return {"pid": os.getpid(), "cold": context.cold, "env": env}


async def say_aloud(context: Any, request: VariablesRequest) -> dict[str, Any]:
    """Prints."""
    print("what the user printed")
    return {}
