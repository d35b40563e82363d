"""Function platforms behind one port: this machine, a simulator, clouds. `registry` has the clouds by name.

Importing this package imports none of its modules: each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.functions.async_invoke.platform import AsyncInvokePlatform
    from ephemeron.functions.async_invoke.provider import Provider
    from ephemeron.functions.base import Call, Invocation, Limits, Outcome, Platform
    from ephemeron.functions.context import Context
    from ephemeron.functions.local import LocalPlatform
    from ephemeron.functions.simulated import SimulatedPlatform
    from ephemeron.functions.world import Simulation

_LAZY = {
    "AsyncInvokePlatform": "ephemeron.functions.async_invoke.platform",
    "Call": "ephemeron.functions.base",
    "Context": "ephemeron.functions.context",
    "Invocation": "ephemeron.functions.base",
    "Limits": "ephemeron.functions.base",
    "LocalPlatform": "ephemeron.functions.local",
    "Outcome": "ephemeron.functions.base",
    "Platform": "ephemeron.functions.base",
    "Provider": "ephemeron.functions.async_invoke.provider",
    "SimulatedPlatform": "ephemeron.functions.simulated",
    "Simulation": "ephemeron.functions.world",
}

__all__ = [
    "AsyncInvokePlatform",
    "Call",
    "Context",
    "Invocation",
    "Limits",
    "LocalPlatform",
    "Outcome",
    "Platform",
    "Provider",
    "SimulatedPlatform",
    "Simulation",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
