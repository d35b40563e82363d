"""Garbage collection of contributions and merged shards, decided from the states that all ranks report.

Each contribution carries two numbers of its sender: `applied`, the versions its parameters have seen, and
`durable`, the versions that even a replacement of it, started from its checkpoint, would not need again. Hence

- contributions folded into version v may go once every rank has applied v: until then a lost merged object
  can be made again from them;
- version v may go once it is durable at every rank.

So storage is bounded by the checkpoint interval, however long the run, and nothing is ever listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ObjectGC:
    """One aggregator's record of the objects that are still needed. Pure: the caller deletes."""

    world: int
    applied: dict[int, int] = field(default_factory=dict)
    durable: dict[int, int] = field(default_factory=dict)
    _folded: dict[int, list[str]] = field(default_factory=dict)
    _merged: dict[int, list[str]] = field(default_factory=dict)

    def update(self, rank: int, *, applied: int, durable: int) -> None:
        """Records a rank's report. Numbers never decrease: a replaced rank needs its merged objects, which
        `durable` protects, and not the contributions in them."""
        self.applied[rank] = max(applied, self.applied.get(rank, 0))
        self.durable[rank] = max(durable, self.durable.get(rank, 0))

    def record(self, version: int, contributions: Iterable[str], merged: Iterable[str]) -> None:
        """`contributions` went into `version`, which is now stored as `merged`."""
        self._folded.setdefault(version, []).extend(contributions)
        self._merged.setdefault(version, []).extend(merged)

    def expired(self) -> list[str]:
        """Keys that no rank needs any more. Each is returned once."""
        if len(self.applied) < self.world:
            return []
        read, safe = min(self.applied.values()), min(self.durable.values())
        return _take(self._folded, read) + _take(self._merged, safe)

    def state(self) -> dict[str, Any]:
        """State for a successor of this aggregator; plain JSON."""
        return {
            "applied": {str(r): v for r, v in self.applied.items()},
            "durable": {str(r): v for r, v in self.durable.items()},
            "folded": {str(v): keys for v, keys in self._folded.items()},
            "merged": {str(v): keys for v, keys in self._merged.items()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.applied = {int(r): v for r, v in state["applied"].items()}
        self.durable = {int(r): v for r, v in state["durable"].items()}
        self._folded = {int(v): list(keys) for v, keys in state["folded"].items()}
        self._merged = {int(v): list(keys) for v, keys in state["merged"].items()}


def _take(by_version: dict[int, list[str]], below: int) -> list[str]:
    done = [v for v in by_version if v < below]
    return [key for v in done for key in by_version.pop(v)]
