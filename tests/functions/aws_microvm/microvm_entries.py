"""What the MicroVMs of the tests run: the contract's entries, loaded from their file, and two more.

The deployed package has no `ephemeron.testing`, and should not have.
"""

from __future__ import annotations

import importlib.util
import os
import random
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
ENTRIES = _module.declaration("microvm_entries", (*_module.NAMES, "has", "drawn"))
random.seed(7)
"""As in a snapshot: this module is imported before the image is stored, and every MicroVM has the same state."""


@dataclass(frozen=True, kw_only=True)
class VariablesRequest:
    """Names of environment variables."""

    variables: tuple[str, ...] = ()


async def has(context: Any, request: VariablesRequest) -> dict[str, Any]:
    return {"has": [name in os.environ for name in request.variables], "cold": context.cold}


async def drawn(context: Any, request: VariablesRequest) -> dict[str, Any]:
    return {"drawn": random.random(), "seeded": random.Random(7).random()}
