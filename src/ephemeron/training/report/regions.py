"""Regions on the page of a run: what each did, and when, as a table and two pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from ephemeron.rendering.page import table
from ephemeron.rendering.svg import ticks as ticks_of
from ephemeron.rendering.svg import time_ticks
from ephemeron.runs.region_activity import RegionActivity
from ephemeron.training.report.charts import Axis, ChartLine, chart
from ephemeron.training.report.headline import usd
from ephemeron.training.report.run_summary import RunSummary
from ephemeron.units import human_bytes

_COLOURS = ("blue", "amber", "green", "grey")

CAPTION = (
    "Waiting is the time in exchanges with other regions: sending, and waiting for them. Bytes are metered by the regions. Staleness is "
    "the number of rounds that a region is ahead of what it has applied of the region furthest behind. Released is the time, of all functions "
    "together, for which a region that had done its share had ended them."
)


def exchanging(story: RunSummary) -> tuple[RegionActivity, ...]:
    """Regions that have exchanged with others."""
    return story.regions if any(region.exchanges for region in story.regions) else ()


def region_table(story: RunSummary, result: Mapping[str, Any] | None) -> Markup:
    """Step rate, staleness, bytes, waiting and cost of each region."""
    costs = {each["name"]: each["cost_usd"] for each in (result or {}).get("regions", ())}
    rows = []
    for region in exchanging(story):
        name = region.started.name
        rows.append(
            [
                name,
                region.started.platform,
                _functions(region),
                f"{region.steps_per_s:.3g}",
                f"{region.exchanges:,}",
                f"{region.staleness}",
                human_bytes(region.wan_bytes_sent),
                human_bytes(region.wan_bytes_received),
                _by_kernel(region),
                _waiting(region),
                f"{region.released_s:.0f} s" if region.released else "–",
                usd(costs[name]) if name in costs else "–",
            ]
        )
    head = (
        "region",
        "platform",
        "functions",
        "steps/s at the end",
        "exchanges",
        "staleness",
        "sent",
        "received",
        "by the kernel",
        "waiting",
        "released",
        "cost",
    )
    return table(head, rows, words=2)


def _by_kernel(region: RegionActivity) -> str:
    """Bytes sent and received over TCP, as the kernel has counted."""
    if not region.wan_kernel_bytes_sent:
        return "–"
    return f"{human_bytes(region.wan_kernel_bytes_sent)}, {human_bytes(region.wan_kernel_bytes_received)}"


def _waiting(region: RegionActivity) -> str:
    """Part of its time that it has waited, and what was predicted at the start."""
    predicted = region.started.predicted_waiting_share
    return f"{region.waiting_share:.1%}" + ("" if predicted is None else f" (predicted {predicted:.1%})")


def _functions(region: RegionActivity) -> str:
    """Functions from the start on: `4 → 2 → 3`."""
    return " → ".join(f"{n:,}" for n in (region.started.workers, *(change.workers for change in region.resized)))


def waiting_chart(story: RunSummary) -> Markup:
    """Waiting share of each region so far, over time."""
    lines = [
        ChartLine(label=label, points=tuple((p.t, 100 * p.waiting_share) for p in region.points), colour=colour)
        for label, colour, region in _named(story)
    ]
    most = max((y for line in lines for _, y in line.points), default=0.0) or 1.0
    return _over_time(story, lines, "waiting, %", most, "{:.3g}")


def progress_chart(story: RunSummary) -> Markup:
    """Iterations of each region over time."""
    lines = [
        ChartLine(label=label, points=tuple((p.t, float(p.iterations)) for p in region.points), colour=colour)
        for label, colour, region in _named(story)
    ]
    most = max((y for line in lines for _, y in line.points), default=0.0) or 1.0
    return _over_time(story, lines, "iterations", most, "{:,.0f}")


def _named(story: RunSummary) -> list[tuple[str, str, RegionActivity]]:
    return [(region.started.name, _COLOURS[i % len(_COLOURS)], region) for i, region in enumerate(exchanging(story))]


def _over_time(story: RunSummary, lines: list[ChartLine], title: str, most: float, form: str) -> Markup:
    axis = Axis(title=title, lo=0.0, hi=most * 1.04, ticks=ticks_of(0.0, most * 1.04, 5, form.format))
    return chart(lines, time_ticks(0, story.seconds, 6), (0.0, story.seconds), "time since launch", axis, None)
