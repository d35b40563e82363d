"""The life of a data flow in a service, as decisions only (DPFlow section 4.3.2, figure 4-7).

    register ─▶ created ─▶ ready ◀─▶ accessed
                             │  ▲
                          idle_s │ access
                             ▼  │
                            idle ─▶ deleted

Created: described, nothing runs. Ready: its router runs. Accessed: somebody reads it. Idle: nobody has read it for
`idle_s`, and its router was ended, so an unused flow costs nothing. The paper lets only idle flows be deleted; so does
this, and created ones, which cost as little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from ephemeron.errors import JobError

State: TypeAlias = Literal["created", "ready", "accessed", "idle"]
"""Deleted flows are not in the registry any more."""
Registered: TypeAlias = Literal["new", "updated", "same"]


@dataclass(slots=True, kw_only=True)
class FlowEntry:
    """A registered flow."""

    name: str
    version: int
    signature: str
    """What its steps are, in words: two definitions of one version must agree in it."""
    samples: int
    state: State = "created"
    used_at: float = 0.0
    """When somebody last read it or asked for it, on the caller's clock."""


class Registry:
    """All flows of a service.

    Args:
        idle_s: how long a flow that nobody reads keeps its router.
    """

    def __init__(self, *, idle_s: float) -> None:
        self.idle_s = idle_s
        self.flows: dict[str, FlowEntry] = {}

    def __getitem__(self, name: str) -> FlowEntry:
        if name not in self.flows:
            raise JobError(f"no flow {name!r} is registered here", remedy="register it first")
        return self.flows[name]

    def register(self, *, name: str, version: int, signature: str, samples: int, now: float) -> Registered:
        """A reader describes a flow.

        Raises:
            JobError: an older version than the registered one, or the same with other steps.
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

    def serving(self, name: str, *, now: float) -> None:
        """Its router runs, and somebody has asked for it."""
        entry = self[name]
        entry.used_at = now
        if entry.state in ("created", "idle"):
            entry.state = "ready"

    def seen(self, name: str, *, readers: int, now: float) -> None:
        """Its router says how many read it."""
        entry = self[name]
        if readers:
            entry.used_at = now
            entry.state = "accessed"
        elif entry.state == "accessed":  # from now on nobody reads it, however long ago its router was last heard
            entry.used_at = now
            entry.state = "ready"

    def wanted(self, name: str, *, now: float) -> bool:
        """Its router is gone: whether to bring it back. Not for ever: readers who are still there ask for it themselves."""
        entry = self[name]
        if entry.state == "accessed" and now - entry.used_at >= self.idle_s:
            entry.state = "ready"
        return entry.state == "accessed"

    def tick(self, *, now: float) -> tuple[str, ...]:
        """Flows that have just become idle: end their routers."""
        idle = [e for e in self.flows.values() if e.state == "ready" and now - e.used_at >= self.idle_s]
        for entry in idle:
            entry.state = "idle"
        return tuple(entry.name for entry in idle)

    @property
    def busy(self) -> tuple[str, ...]:
        """Flows that have a router."""
        return tuple(e.name for e in self.flows.values() if e.state in ("ready", "accessed"))

    def delete(self, name: str) -> None:
        """Forgets a flow.

        Raises:
            JobError: there is none of that name, or it is in use.
        """
        if self[name].state not in ("created", "idle"):
            raise JobError(
                f"flow {name} is {self[name].state} and cannot be deleted",
                remedy=f"end its readers, and wait until it is idle ({self.idle_s:g} s)",
            )
        del self.flows[name]

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"flows": [asdict(entry) for entry in self.flows.values()]}

    def load_state_dict(self, state: Mapping[str, Any], *, now: float) -> None:
        """What another registry was, on a clock that may be another one."""
        self.flows = {e["name"]: FlowEntry(**{**e, "used_at": now}) for e in state["flows"]}
