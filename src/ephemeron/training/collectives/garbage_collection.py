"""Garbage collection: which objects may be deleted, decided from the progress that every rank reports. Pure.

Each contribution carries two numbers of its sender: `applied`, the number of versions that its parameters contain, and
`durable`, the number of versions that a replacement, started from the sender's checkpoint, would not need again. Hence

- contributions to version v may be deleted once every rank has applied v: until then a lost merged object can be made
  again from them;
- version v may be deleted once it is durable at every rank.

So storage is bounded by the checkpoint interval, however long the run, and the store is never listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ephemeron.training.collectives.group import GarbageState


@dataclass(slots=True)
class ObjectGC:
    """One aggregator's view of which objects are still needed. The caller deletes the expired ones."""

    world: int
    applied: dict[int, int] = field(default_factory=dict)
    durable: dict[int, int] = field(default_factory=dict)
    _contributions: dict[int, list[str]] = field(default_factory=dict)
    _merged: dict[int, list[str]] = field(default_factory=dict)

    def update(self, rank: int, *, applied: int, durable: int) -> None:
        """Takes in a rank's report. Numbers never decrease: a replaced rank needs merged objects, which `durable` protects,
        and not the contributions that they were made of."""
        self.applied[rank] = max(applied, self.applied.get(rank, 0))
        self.durable[rank] = max(durable, self.durable.get(rank, 0))

    def record(self, version: int, contributions: Iterable[str], merged: Iterable[str]) -> None:
        """Takes in that `version` was made of the objects `contributions`, and is stored as the objects `merged`."""
        self._contributions.setdefault(version, []).extend(contributions)
        self._merged.setdefault(version, []).extend(merged)

    def expired(self) -> list[str]:
        """Keys that no rank needs any more. Each is returned once."""
        if len(self.applied) < self.world:
            return []
        read, safe = min(self.applied.values()), min(self.durable.values())
        return _take(self._contributions, read) + _take(self._merged, safe)

    def state(self) -> GarbageState:
        """State for a successor of this aggregator."""
        return GarbageState(
            applied=dict(self.applied),
            durable=dict(self.durable),
            contributions={v: tuple(keys) for v, keys in self._contributions.items()},
            merged={v: tuple(keys) for v, keys in self._merged.items()},
        )

    def load(self, state: GarbageState) -> None:
        """Restores what `state` returned."""
        self.applied, self.durable = dict(state.applied), dict(state.durable)
        self._contributions = {v: list(keys) for v, keys in state.contributions.items()}
        self._merged = {v: list(keys) for v, keys in state.merged.items()}


def _take(by_version: dict[int, list[str]], below: int) -> list[str]:
    done = [v for v in by_version if v < below]
    return [key for v in done for key in by_version.pop(v)]
