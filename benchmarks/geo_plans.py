"""Elastic scheduling, simulated: tables 5 and 6 with figures 8 and 9 of Cloudless-Training.

Each case is trained with all cores (the baseline) and with those of `regions plan`. Waiting is the time for which cores wait at exchanges, the exchange itself
included; cost is counted as in `geo_allocations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.geo_allocations import AVAILABLE, CORES, WORKLOADS, Allocation, trained
from benchmarks.geo_worlds import workplace
from ephemeron.regions.planning import PlanRequest, plan_regions
from ephemeron.training.job import RegionPlanMethod

CASES = (
    (Allocation(shares=(1, 1), kinds=("cascade-lake", "skylake")), (12, 8)),
    (Allocation(shares=(2, 1), kinds=("cascade-lake", "cascade-lake")), (12, 6)),
    (Allocation(shares=(2, 1), kinds=("cascade-lake", "skylake")), (12, 4)),
)
"""Table 5, with the plans of the paper."""
TABLE_6 = {
    "lenet": {"waiting": (46.0, 82.6), "cost": (13.8, 16.0)},
    "resnet": {"waiting": (82.3, 94.6), "cost": (9.2, 15.7)},
    "deepfm": {"waiting": (6.8, 26.0), "cost": (13.4, 24.0)},
}
"""Ranges of the reductions over the three cases, in percent."""
_METHODS: tuple[RegionPlanMethod, ...] = ("match", "cheapest")


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Plans, and what they save."""
    rows = [_case(model, number, say) for model in (("lenet",) if quick else WORKLOADS) for number in range(1, 2 if quick else 4)]
    return {"simulated": True, "cores_of_a_function": CORES, "table_5_and_6": rows, "summary": _summary(rows, say)}


def _case(model: str, number: int, say: Callable[[str], None]) -> dict[str, Any]:
    allocation, paper = CASES[number - 1]
    plans = {
        method: tuple(region.cores for region in plan_regions(allocation.regions(), PlanRequest(method=method)).regions)
        for method in _METHODS
    }
    with workplace() as folder:
        before = trained(folder, WORKLOADS[model], allocation, (AVAILABLE, AVAILABLE))
        after = trained(folder, WORKLOADS[model], allocation, plans["match"])
    row = {
        "model": model,
        "case": number,
        "allocation": allocation.title,
        "paper_plan": list(paper),
        "plans": {method: list(cores) for method, cores in plans.items()},
        "baseline": before,
        "planned": after,
        "waiting_reduction_percent": _less(before["waiting_core_s"], after["waiting_core_s"]),
        "cost_reduction_percent": _less(before["cost_usd"], after["cost_usd"]),
        "core_hours_reduction_percent": _less(before["core_hours"], after["core_hours"]),
        "time_ratio": round(after["seconds"] / before["seconds"], 4),
    }
    say(
        f"{model}, case {number}: plan {plans['match-straggler']} (paper {paper}); waiting -{row['waiting_reduction_percent']} %, cost "
        f"-{row['cost_reduction_percent']} % (core hours -{row['core_hours_reduction_percent']} %), {row['time_ratio']} x the time; "
        f"accuracy {before['accuracy']} to {after['accuracy']}"
    )
    return row


def _summary(rows: list[dict[str, Any]], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Table 6: least and most of each reduction by model, ours beside the paper's; cost as the paper counts it (table 3), for cores and time."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        entry: dict[str, Any] = {"model": model}
        for what, key in (("waiting", "waiting"), ("cost", "core_hours")):
            values = [row[f"{key}_reduction_percent"] for row in own]
            entry[what] = {"paper_percent": list(TABLE_6[model][what]), "ours_percent": [min(values), max(values)]}
        say(f"table 6, {model}: {entry['waiting']}, cost {entry['cost']}")
        found.append(entry)
    return found


def _less(before: float, after: float) -> float:
    return round(100 * (1 - after / before), 1)
