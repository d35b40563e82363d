"""SIREN: functions of a run, chosen epoch by epoch by a learned policy (survey, section 2.3; `docs/siren.md`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ephemeron.errors import MissingExtra

if TYPE_CHECKING:
    from ephemeron.tuning.siren.environment import Environment, EnvironmentSpec, Noise

_EXPORTS = {"Environment": "environment", "EnvironmentSpec": "environment", "Noise": "environment"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] == "gymnasium":
            raise MissingExtra("Gymnasium", "siren") from None
        raise


__all__ = ["Environment", "EnvironmentSpec", "Noise"]
