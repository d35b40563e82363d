"""Waiting of regions, simulated: figure 2 of Cloudless-Training, LeNet with all cores of two regions under four allocations of devices and data.

The shares of the figure are not in the text of the paper; it states that the slowest region alone sets the pace. Beside what was measured stands what the
load powers of equation 1 predict: 1 - LP(slowest) / LP(region).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.geo_allocations import AVAILABLE, WORKLOADS, Allocation, trained
from benchmarks.geo_worlds import workplace
from ephemeron.regions.planning import PlanRequest, plan_regions

ALLOCATIONS = (
    Allocation(shares=(1, 1), kinds=("cascade-lake", "skylake")),
    Allocation(shares=(2, 1), kinds=("cascade-lake", "cascade-lake")),
    Allocation(shares=(2, 1), kinds=("cascade-lake", "skylake")),
    Allocation(shares=(1, 2), kinds=("cascade-lake", "skylake")),
)


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Waiting shares by allocation."""
    rows = []
    for allocation in ALLOCATIONS[:1] if quick else ALLOCATIONS:
        with workplace() as folder:
            found = trained(folder, WORKLOADS["lenet"], allocation, (AVAILABLE, AVAILABLE))
        plan = plan_regions(allocation.regions(), PlanRequest(method="all"))
        row = {
            "allocation": allocation.title,
            "paper_percent": None,
            "predicted_percent": [round(100 * region.waiting_share, 1) for region in plan.regions],
            "waiting_percent": [round(100 * share, 1) for share in found["waiting_share"]],
            "seconds": found["seconds"],
        }
        say(f"figure 2, {row['allocation']}: waiting {row['waiting_percent']} %, by load power {row['predicted_percent']} %")
        rows.append(row)
    return {"simulated": True, "model": "lenet", "cores": [AVAILABLE, AVAILABLE], "figure_2": rows}
