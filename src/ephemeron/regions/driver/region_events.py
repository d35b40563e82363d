"""One event stream for a run of several groups: events of the groups, with the ranks of the run, in the run's own log.

Each event of a group becomes exactly one event of the run, so a client that attaches later knows how many of each group are there
already. What a group says of itself as a run becomes a note that begins with its name.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

from ephemeron.errors import PlatformError
from ephemeron.events import Event, GenerationStarted, GroupStarted, Note, RegionAdded, RegionResized, RunEnded, RunStarted, to_json
from ephemeron.functions.jsonl import Journal
from ephemeron.runs.folders import GROUPS, RunFolder, events_of
from ephemeron.training.driver.lifecycle import OnEvent
from ephemeron.units import human_count

_OF_CLIENT = "client: "
"""Beginning of notes that a driver passes on and does not add to the log of its run."""

_log = logging.getLogger(__name__)


class GroupEvents:
    """Writer of the run's log.

    Args:
        folder: of the run.
        groups: in their order.
        on_event: called with every event of the run, old ones first.
        simulated: invocations of groups may have the same names.
    """

    def __init__(self, folder: RunFolder, groups: Sequence[GroupStarted], on_event: OnEvent, *, simulated: bool) -> None:
        self._groups, self._on_event, self._simulated = list(groups), on_event, simulated
        self._known: Counter[int] = Counter()
        """By group, events that the log has from earlier clients."""
        for event in events_of(folder) if folder.events.exists() else ():
            origin = self._origin(event)
            if origin is not None:
                self._known[origin] += 1
            on_event(event)
        self._journal = Journal(folder.events)

    def emit(self, event: Event) -> None:
        """Adds an event of the run itself."""
        self._journal.append(to_json(event))
        if self._journal.problem:
            _log.warning("%s", PlatformError(self._journal.problem))
        self._on_event(event)

    def add(self, group: GroupStarted, t: float) -> None:
        """Adds a group, and tells it."""
        self._groups.append(group)
        self.emit(RegionAdded(t=t, group=group))

    def relay(self, group: int) -> OnEvent:
        """A callback for the events of a group, old ones first."""
        known = self._known[group]
        seen = 0

        def relayed(event: Event) -> None:
            nonlocal seen
            own = isinstance(event, Note) and event.text.startswith(_OF_CLIENT)
            seen += not own
            if own or seen > known:
                self.emit(self._of_run(group, event))

        return relayed

    def _of_run(self, number: int, event: Event) -> Event:
        group = self._groups[number]
        match event:
            case RunStarted():
                text = "; ".join([f"{human_count(event.workers, 'function')} of {event.memory_mb} MB on {event.platform}", *event.notes])
                return Note(t=event.t, text=f"[{group.name}] {text}")
            case RunEnded():
                return Note(t=event.t, text=f"[{group.name}] {event.status}")
            case GenerationStarted():
                return RegionResized(
                    t=event.t,
                    region=group.name,
                    workers=event.workers,
                    memory_mb=event.memory_mb,
                    batch_size=event.batch_size,
                    from_iteration=event.from_iteration,
                )
            case Note():
                return dataclasses.replace(event, text=f"[{group.name}] {event.text}")
        if not hasattr(event, "rank"):
            return Note(t=event.t, text=f"[{group.name}] {event.kind}")
        changes: dict[str, object] = {"rank": group.rank(event.rank)}
        if self._simulated and hasattr(event, "invocation"):
            changes["invocation"] = f"{group.name}-{event.invocation}"
        return dataclasses.replace(event, **changes)  # type: ignore[arg-type]

    def _origin(self, event: Event) -> int | None:
        """Number of the group that an event of the log comes from; None: the run itself."""
        rank = getattr(event, "rank", None)
        for number, group in enumerate(self._groups):
            if rank is not None and group.has(rank):
                return number
            if isinstance(event, RegionResized) and event.region == group.name:
                return number
            if isinstance(event, Note) and event.text.startswith(f"[{group.name}] "):
                return None if event.text.startswith(f"[{group.name}] {_OF_CLIENT}") else number
        return None


def members_of(folder: RunFolder) -> list[RunFolder]:
    """Folders of the groups of a run, in their order; empty: it has none."""
    return [RunFolder(folder.path / GROUPS / f"{folder.run_id}-{group.name}") for group in regions_of(folder)]


def regions_of(folder: RunFolder) -> list[GroupStarted]:
    if not (folder.path / GROUPS).is_dir():
        return []
    events = list(events_of(folder))
    begun = next((e.groups for e in events if isinstance(e, RunStarted)), [])
    return [*begun, *(e.group for e in events if isinstance(e, RegionAdded))]
