"""Settings of a backend of Lithops, and overrides of Lithops' configuration for long functions."""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ephemeron.errors import JobError, MissingExtra

LOCALHOST = "localhost"
MARGIN_S = 30.0
"""Time of Lithops itself before and after a function: imports, fetching the call, writing its status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LithopsSettings:
    """Location of functions. Without secrets: those stay in Lithops' own configuration."""

    backend: str = LOCALHOST
    storage: str = ""
    """Empty: that of Lithops' configuration; for localhost, localhost."""
    runtime: str = ""
    """Image or interpreter in which ephemeron is installed; empty: on localhost this interpreter, else as configured."""
    timeout_s: float = 900.0
    """Time limit of a function on the backend (AWS Lambda: 900), Lithops' part included."""
    places: int = 64
    """Functions at once."""
    mb_per_vcpu: float = 1769.0
    every_s: float = 5.0
    """Seconds between reports of functions, and between rounds of the collector."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables for functions. No secrets: Lithops stores them."""

    def located(self) -> LithopsSettings:
        """Itself: nothing is left open.

        Raises:
            JobError: a number is out of its range.
        """
        if self.timeout_s <= MARGIN_S:
            raise JobError(f"timeout_s {self.timeout_s:g} leaves functions no time", remedy=f"Lithops itself takes {MARGIN_S:g} s")
        if self.places < 1 or self.every_s <= 0 or self.mb_per_vcpu <= 0:
            raise JobError("places, every_s and mb_per_vcpu have to be positive")
        return self

    @property
    def lifetime_s(self) -> float:
        """Time limit of a call."""
        return self.timeout_s - MARGIN_S


def lithops_module() -> Any:
    """Lithops itself.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("lithops")
    except ModuleNotFoundError:
        raise MissingExtra("lithops", "lithops") from None


def overridden(config: Mapping[str, Any], settings: LithopsSettings) -> Mapping[str, Mapping[str, object]]:
    """The user's configuration of Lithops, with what long functions need. Leaves its argument alone."""
    out: dict[str, dict[str, object]] = copy.deepcopy(dict(config))
    common = out.setdefault("lithops", {})
    backend = out.get(settings.backend) or {}
    out[settings.backend] = backend
    common["backend"] = settings.backend
    if settings.storage or settings.backend == LOCALHOST:
        common["storage"] = settings.storage or LOCALHOST
    # A client that leaves would take the calls of functions that are still to read theirs: they outlive it here.
    common["data_cleaner"] = False
    # Queues would be one more service that functions have to reach; futures are a second log source only.
    common["monitoring"] = "storage"
    common["monitoring_interval"] = max(1, math.ceil(settings.every_s))
    common["telemetry"] = False
    # By default an hour on localhost, and elsewhere the limit of the runtime.
    common["execution_timeout"] = math.ceil(settings.timeout_s)
    if settings.backend == LOCALHOST:
        backend["runtime"] = settings.runtime or sys.executable
        # Version 1 runs one job after the other: the second worker would start when the first has waited in vain for it.
        backend["version"] = 2
        # As many as there are CPUs, by default: a successor would wait for its predecessor's end, which waits for it.
        backend["worker_processes"] = settings.places
    else:
        # 180 s on AWS Lambda, 300 s on Aliyun, 600 s on Knative and Kubernetes.
        backend["runtime_timeout"] = math.ceil(settings.timeout_s)
        if settings.runtime:
            backend["runtime"] = settings.runtime
    return out
