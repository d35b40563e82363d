"""Decisions of the scheduling function: a plan for each run, kept until what was measured asks for another. Pure.

`plan` is asked when a run begins, `measured` while it trains: with iteration times of its regions the plan is made anew, and the answer says
which regions change. What the last plan was is part of the state, so a function that takes over goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.regions.control.addressing import ControlMachine
from ephemeron.regions.planning import PlanRequest, RegionPlan, plan_regions, replan_regions
from ephemeron.regions.region_files import Regions, check_regions
from ephemeron.regions.scheduling.replanning import MeasuredIterations


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """A request to the scheduling function."""

    action: Literal["plan", "measured", "lookup"]
    regions: Regions | None = None
    """For `plan`."""
    request: PlanRequest = field(default_factory=PlanRequest)
    """For `plan`."""
    measured: Mapping[str, tuple[MeasuredIterations, ...]] = field(default_factory=dict)
    """For `measured`: by region, its iterations since the last request."""
    samples: int = 0
    """For `measured`: of a pass over the data of all regions, now; 0: as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleAnswer:
    """Answer of the scheduling function."""

    plan: RegionPlan | None
    """None: no plan was asked for yet."""
    changed: tuple[str, ...] = ()
    """Regions whose cores differ from those of the plan before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScheduleState:
    regions: Regions | None = None
    request: PlanRequest = field(default_factory=PlanRequest)
    plan: RegionPlan | None = None
    promised_s: float | None = None
    """Time of a pass that the first plan has said; None: that plan had no times."""


class Scheduler(ControlMachine):
    """The plan of one run."""

    def __init__(self) -> None:
        self._now = _ScheduleState()

    def apply(self, request: Mapping[str, Any], now: float) -> Mapping[str, Any]:
        asked = build(ScheduleRequest, request, where="request of scheduling")
        if asked.action == "plan":
            if asked.regions is None:
                raise JobError("plan: there are no regions", remedy="give those of a regions.toml")
            check_regions(asked.regions)
            plan = plan_regions(asked.regions, asked.request)
            promised_s = None if plan.relative else plan.seconds
            self._now = _ScheduleState(regions=asked.regions, request=asked.request, plan=plan, promised_s=promised_s)
        elif asked.action == "measured":
            return self._measured(asked)
        return _answer(self._now.plan)

    def _measured(self, asked: ScheduleRequest) -> Mapping[str, Any]:
        before = self._now
        if before.regions is None or before.plan is None:
            raise JobError("measured: there is no plan yet", remedy="ask for one first")
        for name in asked.measured:
            before.regions.named(name)
        known = {**before.request.measured, **asked.measured}
        request = replace(before.request, measured=known, samples=asked.samples or before.request.samples)
        plan, changed = replan_regions(before.regions, request, before.plan, promised_s=before.promised_s)
        self._now = replace(before, request=request, plan=plan)
        return _answer(plan, *changed)

    def state(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = plain(self._now)
        return found

    def restore(self, state: Mapping[str, Any], now: float) -> None:
        self._now = build(_ScheduleState, state, where="state of scheduling")


def _answer(plan: RegionPlan | None, *changed: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = plain(ScheduleAnswer(plan=plan, changed=changed))
    return found
