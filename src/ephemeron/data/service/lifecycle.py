"""Life cycle of the flows of a service, as decisions only (DPFlow section 4.3.2, figure 4-7).

    register ─▶ created ─▶ ready ◀─▶ accessed
                             │  ▲
                          idle_s │ access
                             ▼  │
                            idle ─▶ deleted

Created: described, nothing runs. Ready: its router runs. Accessed: it has readers. Idle: it has had no reader for `idle_s`, and
its router was ended, so an unused flow costs nothing. The paper lets only idle flows be deleted; here created ones can be
deleted as well, which cost as little.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ephemeron.errors import JobError

State: TypeAlias = Literal["created", "ready", "accessed", "idle"]
"""State of a registered flow; deleted flows are removed from the registry."""
Registered: TypeAlias = Literal["new", "updated", "same"]


@dataclass(slots=True, kw_only=True)
class FlowEntry:
    """A registered flow."""

    name: str
    version: int
    signature: str
    """Description of its steps: two definitions of one version must have the same."""
    samples: int
    state: State = "created"
    used_at: float = 0.0
    """Time of the last read or access, on the caller's clock."""


class Registry:
    """All flows of a service.

    Args:
        idle_s: how long a flow without readers keeps its router.
    """

    def __init__(self, *, idle_s: float) -> None:
        self.idle_s = idle_s
        self.flows: dict[str, FlowEntry] = {}

    def __getitem__(self, name: str) -> FlowEntry:
        if name not in self.flows:
            raise JobError(f"no flow {name!r} is registered here", remedy="register it first")
        return self.flows[name]

    def register(self, *, name: str, version: int, signature: str, samples: int, now: float) -> Registered:
        """Adds or updates the description of a flow.

        Raises:
            JobError: an older version than the registered one, or the same version with other steps.
        """
        old = self.flows.get(name)
        if old is not None and version < old.version:
            raise JobError(
                f"flow {name}: version {version} is older than version {old.version}, which the service has",
                remedy="raise the version, or delete the flow from the service",
            )
        if old is not None and version == old.version:
            if (signature, samples) != (old.signature, old.samples):
                raise JobError(
                    f"flow {name}, version {version} is registered with other steps or samples: "
                    f"{old.signature}, {old.samples} samples; this one: {signature}, {samples} samples",
                    remedy="raise the version whenever the flow changes",
                )
            old.used_at = now
            return "same"
        self.flows[name] = FlowEntry(name=name, version=version, signature=signature, samples=samples, used_at=now)
        return "new" if old is None else "updated"

    def set_serving(self, name: str, *, now: float) -> None:
        """Records that a flow's router runs and was asked for."""
        entry = self[name]
        entry.used_at = now
        if entry.state in ("created", "idle"):
            entry.state = "ready"

    def set_readers(self, name: str, *, readers: int, now: float) -> None:
        """Records the number of readers that a flow's router has reported."""
        entry = self[name]
        if readers:
            entry.used_at = now
            entry.state = "accessed"
        elif entry.state == "accessed":  # idleness begins now, however long ago the router was last heard
            entry.used_at = now
            entry.state = "ready"

    def should_restart(self, name: str, *, now: float) -> bool:
        """Whether to restart a lost router. Not indefinitely: readers that are still there request it themselves."""
        entry = self[name]
        if entry.state == "accessed" and now - entry.used_at >= self.idle_s:
            entry.state = "ready"
        return entry.state == "accessed"

    def tick(self, *, now: float) -> tuple[str, ...]:
        """Flows that have just become idle: their routers are to be ended."""
        idle = [e for e in self.flows.values() if e.state == "ready" and now - e.used_at >= self.idle_s]
        for entry in idle:
            entry.state = "idle"
        return tuple(entry.name for entry in idle)

    @property
    def busy(self) -> tuple[str, ...]:
        """Flows that have a router."""
        return tuple(e.name for e in self.flows.values() if e.state in ("ready", "accessed"))

    def delete(self, name: str) -> None:
        """Removes a flow.

        Raises:
            JobError: there is no such flow, or it is in use.
        """
        if self[name].state not in ("created", "idle"):
            raise JobError(
                f"flow {name} is {self[name].state} and cannot be deleted",
                remedy=f"end its readers, and wait until it is idle ({self.idle_s:g} s)",
            )
        del self.flows[name]

    def entries(self) -> tuple[FlowEntry, ...]:
        """Copies of all entries, to be stored."""
        return tuple(replace(entry) for entry in self.flows.values())

    def restore(self, entries: Iterable[FlowEntry], *, now: float) -> None:
        """Takes over stored entries. All of them count as used now, since the clock may be another one."""
        self.flows = {entry.name: replace(entry, used_at=now) for entry in entries}
