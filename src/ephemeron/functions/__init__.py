"""Whatever runs functions, behind one port. The platforms themselves are imported by their module's path."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.functions.base import Call, Invocation, Limits, Outcome, Platform

__all__ = ["Call", "Invocation", "Limits", "Outcome", "Platform"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ephemeron.functions.base"), name)
