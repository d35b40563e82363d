"""New plans for the functions of groups while they train, made by the client that drives them.

The decision is that of `ephemeron.regions.online`, a product above training, which is found by name: from the events of the groups to
numbers of functions. Here it is made again and again, and the drivers of the groups ask their functions for the changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ephemeron.errors import EphemeronError
from ephemeron.events import Event, Note, RegionReplanned
from ephemeron.regions.online import RegionMeasurement, online_plan
from ephemeron.training.driver.lifecycle import OnEvent
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.job.generation import Resize
from ephemeron.training.worker.spec import RunSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watched:
    """A group that may be planned anew."""

    measurement: Any
    """A `regions.online.RegionMeasurement`."""
    driver: RunDriver | None = None
    """None: it is not driven now."""
    asked: int | None = None
    """Functions that it was asked for, and does not have yet."""


class GroupReplanner:
    """Plans of one run.

    Args:
        every_s: seconds between two plans; 0: none are made.
        emit: adds an event of the run.
    """

    def __init__(self, every_s: float, emit: Callable[[Event], None]) -> None:
        self._every_s, self._emit = every_s, emit
        self._groups: dict[str, _Watched] = {}
        self._said: set[str] = set()

    def watched(self, name: str, spec: RunSpec, on_event: OnEvent, *, most: int) -> OnEvent:
        """A callback for all events of a group, in front of another one.

        Args:
            name: of the group.
            spec: of it.
            on_event: the other one.
            most: functions that it may have; 0: as many as it starts with.
        """
        if not self._every_s:
            return on_event
        measurement = RegionMeasurement(name, spec, most=most)
        group = self._groups[name] = _Watched(measurement)

        def watched(event: Event) -> None:
            measurement.feed(event)
            if event.kind == "generation_started":
                group.asked = None
            on_event(event)

        return watched

    def driven(self, name: str) -> Callable[[RunDriver | None], None]:
        """A callback that is told who drives a group; None: it has ended."""

        def driven(driver: RunDriver | None) -> None:
            if name in self._groups:
                self._groups[name].driver = driver

        return driven

    async def run(self) -> None:
        """Makes plans until it is cancelled."""
        while self._every_s:
            await asyncio.sleep(self._every_s)
            await self._plan()

    async def _plan(self) -> None:
        running = {name: group for name, group in self._groups.items() if group.driver is not None}
        if any(group.asked for group in running.values()):
            return  # what a change is worth is known when it has begun
        regions = [group.measurement.region() for group in running.values()]
        found = online_plan(regions) if regions else None
        if found is None:
            return
        for change in found.regions:
            group = running[change.name]
            if change.wanted == change.workers or group.driver is None:
                continue
            driver, t = group.driver, group.driver.now()
            try:
                asked = await driver.ask(Resize(workers=change.wanted, batch_size=change.batch_size), name=f"replan {t:.3f}")
            except EphemeronError as e:  # the store cannot be reached, or the platform has no room: the next plan asks again
                self._tell(t, f"region {change.name} cannot have {change.wanted} functions in place of {change.workers}: {e}")
                continue
            if not asked:
                continue
            group.asked = change.wanted
            self._emit(
                RegionReplanned(
                    t=t,
                    region=change.name,
                    workers=change.workers,
                    wanted=change.wanted,
                    iteration_s=round(change.iteration_s, 6),
                    time_factor=round(found.pass_s / found.pass_before_s, 4),
                    usd_per_hour_before=round(found.usd_per_hour_before, 9),
                    usd_per_hour=round(found.usd_per_hour, 9),
                )
            )

    def _tell(self, t: float, text: str) -> None:
        _log.info("%s", text)
        if text not in self._said:
            self._said.add(text)
            self._emit(Note(t=t, level="warning", text=text))
